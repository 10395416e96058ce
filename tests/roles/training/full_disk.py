"""What test_saving.py starts, with FOLDER KIND: the actor's saving on a disk that is full, and then has room. Prints JSON.

KIND is "tmpfs", a small one that is mounted there, or "limit", on the size of a file: both make real writes fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import torch

from rondo.models import checkpoint
from rondo.models.optimizer import make_optimizer
from rondo.roles.training import room
from rondo.roles.training.room import NO_ROOM
from rondo.roles.training.saving import Saving
from rondo.runtime.checkpoints import complete
from rondo.runtime.records.timeline import span
from rondo.runtime.waits import pending, wait_for

OUT = Path(sys.argv[1])
MODEL = torch.nn.Linear(512, 512)  # about a megabyte
OPTIMIZER = make_optimizer(MODEL, lr=1e-3)
SIZE = 8 << 20


class Disk:
    """Full or not, as an operator would make it."""

    def __init__(self) -> None:
        self.mounted = sys.argv[2] == "tmpfs"
        if self.mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(OUT)], check=True)
        (OUT / "checkpoints").mkdir()

    def fill(self) -> None:
        if self.mounted:
            with contextlib.suppress(OSError), (OUT / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))

    def make_room(self) -> None:
        if self.mounted:
            (OUT / "filler").unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Trainer:
    """As the actor's saving sees it, on one rank."""

    def stage(self, held: checkpoint.Held | None) -> checkpoint.Staged:
        return checkpoint.stage(MODEL, OPTIMIZER, held)

    def write(self, *arguments: Any, **named: Any) -> bool:
        return checkpoint.write(*arguments, **named)

    def save(self, folder: Path, extra: Any, beside: Any, *, tokenizer_path: str) -> None:
        checkpoint.save(folder, MODEL, OPTIMIZER, extra, beside)


class Bus:
    async def call(self, method: str, version: int) -> dict[str, Any]:
        return {"state": orjson.dumps({"groups": []})}

    def views(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


async def main() -> dict[str, Any]:
    room.LOOK_S = 0.02
    disk, told, waits = Disk(), list[tuple[str, int]](), list[str]()
    full = {version: asyncio.Event() for version in (4, 6, 8, 10, 12)}

    async def report(kind: str, data: dict[str, Any]) -> None:
        told.append((kind, data["version"]))
        if kind == NO_ROOM:
            waits.extend(each.name for each in pending() if each.name == "room on the disk" and str(OUT) in each.peer)
            assert data["needed_bytes"] > 1 << 20 and (data["free_bytes"] == 0 or not disk.mounted)
            full[data["version"]].set()

    async def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(function, *args, **kwargs)

    context: Any = SimpleNamespace(
        rank=0, run_dir=OUT, report=report, compute=compute, section=lambda name, limit_s: contextlib.nullcontext(),
        span=lambda name, **_: span(name, "actor"), stopping=asyncio.Event(),
    )  # fmt: skip
    config = SimpleNamespace(
        train=SimpleNamespace(wait_for_room_s=300.0),
        supervision=SimpleNamespace(save_s=300.0, grace_s=0.0),
        critic=None,
    )
    job, trainer = SimpleNamespace(config=config, bus=Bus(), model_path="model"), Trainer()

    async def settle() -> None: ...

    facts: dict[str, Any] = {}
    async with asyncio.TaskGroup() as tasks:
        made: Any = (context, job, trainer, None, settle, lambda work, name: tasks.create_task(work, name=name))
        role = Saving(*made)
        await role.save(2, final=False)
        await role.settled()
        disk.fill()
        await role.save(4, final=False)
        await wait_for(full[4].wait(), name="full", peer="disk", deadline_s=120)
        facts["trains on"] = role._writing is not None and not role._writing.done()
        await role.save(6, final=False)  # takes the place of version 4
        facts["left"] = sorted(path.name for path in (OUT / "checkpoints").iterdir())
        last = tasks.create_task(role.save(8, final=True))
        await wait_for(full[8].wait(), name="full", peer="disk", deadline_s=120)
        facts["last waits"] = not last.done()
        disk.make_room()
        await wait_for(last, name="last", peer="disk", deadline_s=120)
        disk.fill()
        context.stopping.set()  # a stop does not wait for longer than its grace
        await wait_for(role.save(10, final=True), name="stopped", peer="disk", deadline_s=120)
        await role.save(12, final=False)  # as of a run that is not done
        await wait_for(role.settled(), name="stopped", peer="disk", deadline_s=120)
    facts |= {"checkpoints": [path.name for path in complete(OUT / "checkpoints")], "told": told, "waits": waits}
    facts["loads"] = checkpoint.load(OUT / "checkpoints" / "step_000008", MODEL, OPTIMIZER)["version"]
    return facts


print(json.dumps(asyncio.run(main())))
