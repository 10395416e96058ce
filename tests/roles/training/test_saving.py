"""When the actor waits for a checkpoint, and what becomes of an error in one. The bytes: tests/models/test_checkpoint.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rondo.roles.supervised import SupervisedRole
from rondo.roles.training import room
from rondo.roles.training.saving import Saving
from rondo.runtime.checkpoints import MARKER, NoRoom, complete
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.records.timeline import span
from rondo.runtime.waits import wait_for


class Disk:
    """The trainer as the actor's saving sees it; every writing waits for `go`."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.errors = list[Exception]()
        """Of the next writings."""
        self.done: list[str] = []

    def stage(self, held: object) -> str:
        self.done.append("stage" if held is None else f"held {held}")
        return "staged"

    def write(
        self, folder: Path, staged: str, extra: dict[str, Any], beside: Callable[[Path], None], *, gives_way: bool
    ) -> bool:
        self.begun.release()
        assert self.go.acquire(timeout=120)
        if self.errors:
            raise self.errors.pop(0)
        if gives_way:
            return False
        self._mark(folder, extra, beside)
        return True

    def save(
        self, folder: Path, extra: dict[str, Any], beside: Callable[[Path], None], *, tokenizer_path: str | None
    ) -> None:
        self._mark(folder, extra, beside)

    def _mark(self, folder: Path, extra: dict[str, Any], beside: Callable[[Path], None] | None) -> None:
        folder.mkdir(parents=True)
        if beside is not None:
            beside(folder)
        (folder / MARKER).write_text("{}\n")
        index = orjson.loads(orjson.dumps(extra)).get("index")
        self.done.append(f"{folder.name} " + ("of a part" if index is None else f"with index {index['at']}"))


class Bus:
    async def call(self, method: str, version: int) -> dict[str, Any]:
        return {"state": orjson.dumps({"at": version, "groups": []})}

    def views(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Held:
    """The hot snapshot, as a saving sees it."""

    def views(self, version: int) -> str:
        return f"snapshot of {version}"


def saving(
    run_dir: Path,
    disk: Disk,
    told: list[dict[str, Any]],
    tasks: asyncio.TaskGroup,
    snapshot: Held | None = None,
    *,
    critic: object = None,
    part: str | None = None,
) -> Saving:
    async def report(kind: str, data: dict[str, Any]) -> None:
        told.append(data)

    async def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(function, *args, **kwargs)

    async def settle() -> None: ...

    section: Callable[..., Any] = lambda name, limit_s: contextlib.nullcontext()  # noqa: E731
    context: Any = SimpleNamespace(
        stopping=asyncio.Event(),
        rank=0, attempt=0, run_dir=run_dir, report=report, compute=compute, section=section,
        span=lambda name, **_: span(name, "actor"),
    )  # fmt: skip
    train = SimpleNamespace(wait_for_room_s=60.0, save_every=10)
    config = SimpleNamespace(
        train=train, supervision=SimpleNamespace(save_s=1800.0, grace_s=20.0), num_steps=100, critic=critic
    )
    job = SimpleNamespace(config=config, bus=Bus(), model_path="model")
    made: Any = Saving(
        context,
        job,
        disk,
        snapshot,
        settle,
        lambda work, name: tasks.create_task(work, name=name),
        part=part,  # type: ignore[arg-type]
    )
    return made


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_saving_waits_for_it(tmp_path: Path) -> None:
    disk, told = Disk(), list[dict[str, Any]]()
    async with asyncio.TaskGroup() as tasks:
        role = saving(tmp_path, disk, told, tasks)
        await wait_for(role.save(2, final=False), name="first", peer="disk", deadline_s=120)
        assert await asyncio.to_thread(disk.begun.acquire, timeout=120)
        assert (disk.done, told) == (["stage"], [])
        second = tasks.create_task(role.save(4, final=False))
        await asyncio.sleep(0)
        disk.go.release()
        await wait_for(second, name="second", peer="disk", deadline_s=120)
        assert disk.done == ["stage", "step_000002 with index 2", "stage"]
        disk.go.release()
        await wait_for(role.save(5, final=True), name="final", peer="disk", deadline_s=120)
    assert disk.done[3:] == ["step_000004 with index 4", "step_000005 with index 5"]
    assert [path.name[-1] for path in complete(tmp_path / "checkpoints")] == ["2", "4", "5"]
    assert [(record["version"], record["pause_s"] <= record["save_s"]) for record in told] == [
        (2, True),
        (4, True),
        (5, True),
    ]


async def test_a_snapshot_is_written_where_it_lies_and_the_one_that_takes_its_place_waits_for_the_end(
    tmp_path: Path,
) -> None:
    disk = Disk()
    async with asyncio.TaskGroup() as tasks:
        role = saving(tmp_path, disk, [], tasks, Held())
        await role.save(10, final=False)
        assert await asyncio.to_thread(disk.begun.acquire, timeout=120)
        await wait_for(role.let_go_of_snapshots(before=10), name="11", peer="disk", deadline_s=120)
        second = tasks.create_task(role.let_go_of_snapshots(before=11))
        await asyncio.sleep(0)
        assert not second.done() and disk.done == ["held snapshot of 10"]
        disk.go.release()
        await wait_for(second, name="12", peer="disk", deadline_s=120)
        assert disk.done == ["held snapshot of 10", "step_000010 with index 10"]
        assert not any(map(role.is_due, range(11, 20))) and role.is_due(20)


async def test_a_snapshot_that_finds_no_room_gives_its_place_and_a_later_version_is_saved(tmp_path: Path) -> None:
    disk = Disk()
    disk.errors.append(NoRoom(tmp_path, 2, 1))
    async with asyncio.TaskGroup() as tasks:
        role = saving(tmp_path, disk, [], tasks, Held())
        disk.go.release(2)  # it finds no room, and is asked again
        await role.save(10, final=False)
        await wait_for(role.let_go_of_snapshots(before=11), name="12", peer="disk", deadline_s=120)
        assert [version for version in range(11, 20) if role.is_due(version)] == [*range(13, 20)]
        disk.go.release()
        await role.save(13, final=False)
        await wait_for(role.settled(), name="13", peer="disk", deadline_s=120)
        assert disk.done == ["held snapshot of 10", "held snapshot of 13", "step_000013 with index 13"]
        assert not any(map(role.is_due, range(14, 20)))


async def test_a_checkpoint_whose_other_part_does_not_come_in_time_gives_its_place_to_the_next(tmp_path: Path) -> None:
    disk, told = Disk(), list[dict[str, Any]]()
    async with asyncio.TaskGroup() as tasks:
        role, limits = saving(tmp_path, disk, told, tasks, critic=object()), list[float]()

        async def late(version: int, limit_s: float) -> bool:
            limits.append(limit_s)
            raise DeadlineExceeded("critic's part of a checkpoint", "actor-0.0", "critic", limit_s)

        role._part_is_there = late  # type: ignore[method-assign]
        await role.save(10, final=False)
        disk.go.release()
        await role.settled()
    assert (disk.done, told, limits) == (["stage"], [], [1800.0]) and role._gave_way


async def test_an_error_of_a_writer_ends_the_role(tmp_path: Path) -> None:
    disk = Disk()
    error = OSError(5, "Input/output error")
    disk.errors.append(error)
    disk.go.release()
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            role = saving(tmp_path, disk, [], tasks)
            await role.save(2, final=False)
            await wait_for(asyncio.Event().wait(), name="training", peer="rollout", deadline_s=120)
    assert caught.value.exceptions == (error,)
    assert complete(tmp_path / "checkpoints") == []


async def test_a_version_that_has_its_checkpoint_is_not_saved_again(tmp_path: Path) -> None:
    disk, told = Disk(), list[dict[str, Any]]()
    folder = tmp_path / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("{}\n")
    async with asyncio.TaskGroup() as tasks:
        await saving(tmp_path, disk, told, tasks).save(2, final=False)
    assert (disk.done, told) == ([], [])


def test_a_saving_on_a_full_disk_waits_under_a_name_until_there_is_room_or_a_stop_is_over(tmp_path: Path) -> None:
    script = [sys.executable, str(Path(__file__).with_name("full_disk.py")), str(tmp_path)]
    own = ["unshare", "--map-root-user", "--mount"]  # whoever may not mount has files of limited size
    mounts = subprocess.run([*own, "true"], check=False).returncode == 0
    line = [*own, *script, "tmpfs"] if mounts else [*script, "limit"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=560)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["trains on"] and facts["last waits"]
    assert facts["left"] == ["step_000002"]  # nothing of what could not be written
    assert facts["checkpoints"] == ["step_000002", "step_000008"]
    told = [["checkpoint", 2], ["no_room", 4], ["no_room", 6], ["no_room", 8], ["checkpoint", 8]]
    assert facts["told"] == [*told, *([kind, version] for version in (10, 12) for kind in ("no_room", "unsaved"))]
    assert facts["waits"] == ["room on the disk"] * 5
    assert facts["loads"] == 8


async def test_a_job_without_rollouts_that_finds_no_room_for_its_result_waits_as_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, told = [NoRoom(tmp_path, 2, 1)], list[str]()

    def save(folder: Path, extra: object, *, tokenizer_path: str) -> None:
        if full:
            raise full.pop()
        folder.mkdir(parents=True)

    async def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def report(kind: str, data: dict[str, Any]) -> None:
        told.append(kind)

    monkeypatch.setattr(room, "LOOK_S", 0.0)
    context: Any = SimpleNamespace(
        stopping=asyncio.Event(),
        rank=0,
        run_dir=tmp_path,
        report=report,
        compute=compute,
        section=lambda *_: contextlib.nullcontext(),
    )
    role: Any = SupervisedRole(context)
    limits = {"train": SimpleNamespace(wait_for_room_s=60.0), "supervision": SimpleNamespace(save_s=60.0, grace_s=20.0)}
    role._config, role._path = SimpleNamespace(**limits), "model"
    role._backend, role._learning = SimpleNamespace(save=save), SimpleNamespace(position=0)
    await role._save_last(3, is_done=True)
    assert told == ["no_room", "checkpoint"] and (tmp_path / "checkpoints" / "step_000003").is_dir()
