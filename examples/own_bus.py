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

import numpy as np

from rondo.comm.host import Host
from rondo.comm.joining import SyncBus, join
from rondo.comm.partitions import Balanced, StreamingLoader

ROWS, WRITERS, RANKS, PASSES = 256, 2, 2, 2
SETTINGS = {"capacity_bytes": 64 << 20, "num_producers": WRITERS}


def write(folder: str, number: int) -> None:
    """Puts its half of the rows, 16 a put."""
    draw = np.random.default_rng(number)
    with SyncBus(folder, f"writer-{number}") as bus:
        part = bus.partition("replay", **SETTINGS)
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


async def main() -> None:
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rondo-bus-") as folder:
        async with Host(Path(folder) / "bus") as host:
            at = str(host.folder)
            writers = [processes.Process(target=write, args=(at, number)) for number in range(WRITERS)]
            ranks = [processes.Process(target=train, args=(at, rank)) for rank in range(RANKS)]
            doomed = processes.Process(target=score, args=(at, 3))
            for process in (*writers, *ranks, doomed):
                process.start()
            await asyncio.to_thread(doomed.join)
            print("the scorer was killed; another one comes")
            scorer = processes.Process(target=score, args=(at, -1))
            scorer.start()
            for process in (*writers, *ranks, scorer):
                await asyncio.to_thread(process.join)
            async with join(host.folder, "watcher") as bus:
                part = bus.partition("replay")
                await part.opened()
                stats = part.stats()
                print(
                    f"{stats.num_put} rows put, {stats.tasks['score'].num_returned} returned by the dead scorer,",
                    end=" ",
                )
                print(f"{stats.tasks['train'].num_acked} read by the trainer")
                found, _ = await part.list(tags={"of": "writer-1"}, limit=3)
                print("by tag:", [row["key"] for row in found][:3])


if __name__ == "__main__":
    asyncio.run(main())
