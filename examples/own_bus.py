"""Any machine, no GPU, about ten seconds: a bus without a run, for programs of your own.

    python examples/own_bus.py

Two writers put rows of text, a scorer adds a column, and two ranks of a trainer read both through torch's loader, twice over,
balanced by tokens. The scorer is killed midway and comes back: nothing is lost. Every program is a process of its own, which
knows the bus by its folder; started by hand, they would do the same:

    rondo bus /tmp/bus        # then, in any number of other shells: programs that `join` /tmp/bus
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rondo.comm.partitions import Balanced
from rondo.comm.partitions.host import Host
from rondo.comm.partitions.joining import SyncBus, join
from rondo.runtime.processes.guard import die_with_parent

ROWS, WRITERS, RANKS, PASSES = 256, 2, 2, 2
SETTINGS = {"capacity_bytes": 64 << 20, "num_producers": WRITERS}


def write(folder: str, number: int) -> None:
    """Puts its half of the rows, 16 a put."""
    draw = np.random.default_rng(number)
    with SyncBus(folder, f"writer-{number}") as bus:
        part = bus.partition("replay")
        for first in range(number * ROWS // WRITERS, (number + 1) * ROWS // WRITERS, 16):
            tokens = [np.full(draw.integers(8, 200), first + i, np.int32) for i in range(16)]
            part.put({"tokens": tokens}, keys=[f"row-{first + i}" for i in range(16)], tags={"of": f"writer-{number}"})
        part.end()


def score(folder: str, die_after: int) -> None:
    """Adds a column to every row; the first life is killed after so many batches, with one in its hands."""

    async def run() -> None:
        async with join(folder, "scorer") as bus:
            part, batches = bus.partition("replay"), 0
            async for batch in part.stream("score", columns=["tokens"], batch=16, partial=True):
                batches += 1
                if batches == die_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                await part.add(batch, {"score": [np.float32(len(tokens)) for tokens in batch["tokens"]]})
                batch.ack()

    asyncio.run(run())


def train(folder: str, rank: int) -> None:
    """One data-parallel rank: every row once a pass, on one of the ranks."""
    from rondo.comm.partitions import StreamingLoader  # torch: only the trainer has it

    with SyncBus(folder, "trainer", rank=rank, ranks=RANKS) as bus:
        part = bus.partition("replay")
        columns = ["tokens", "score"]
        loader = StreamingLoader(
            part, "train", columns, sampler=Balanced(equal_size=False), batch=16, rank=rank, ranks=RANKS, passes=PASSES
        )
        rows = tokens = 0
        for found in loader:
            assert all(float(score) == len(text) for score, text in zip(found["score"], found["tokens"], strict=True))
            rows += len(found["tokens"])
            tokens += sum(map(len, found["tokens"]))
        print(f"rank {rank}: {rows} rows, {tokens} tokens in {PASSES} passes", flush=True)


def child(what: Any, *arguments: Any) -> None:
    """A process of this program ends with it, however that ends."""
    die_with_parent()
    what(*arguments)


async def ended(process: Any) -> None:
    await asyncio.to_thread(process.join)
    if process.exitcode:
        raise RuntimeError(f"{process.name} must end well, got exit code {process.exitcode}")


async def main() -> None:
    context = multiprocessing.get_context("spawn")

    def start(what: Any, *arguments: Any) -> Any:
        process = context.Process(target=child, args=(what, at, *arguments), daemon=True)
        process.start()
        return process

    with tempfile.TemporaryDirectory(prefix="rondo-bus-") as folder:
        async with Host(Path(folder) / "bus") as host, join(host.folder, "main") as bus:
            at = str(host.folder)
            part = bus.partition("replay", **SETTINGS)  # whoever comes first says how large it may be
            await part.opened()
            doomed = start(score, 3)
            async with asyncio.TaskGroup() as tasks:
                for number in range(WRITERS):
                    tasks.create_task(ended(start(write, number)))
                for rank in range(RANKS):
                    tasks.create_task(ended(start(train, rank)))
                await asyncio.to_thread(doomed.join)
                print("the scorer was killed; another one comes", flush=True)
                tasks.create_task(ended(start(score, -1)))
            stats = part.stats()
            print(
                f"{stats.num_put} rows put, {stats.tasks['score'].num_returned} returned by the dead scorer,", end=" "
            )
            print(f"{stats.tasks['train'].num_acked} read by the trainer")
            found, _ = await part.list(tags={"of": "writer-1"})
            print(f"{len(found)} rows have the tag of writer-1, the first is {found[0]['key']}")


if __name__ == "__main__":
    asyncio.run(main())
