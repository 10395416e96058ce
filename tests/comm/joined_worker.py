"""A program of somebody's own that joins a bus: `python -m tests.comm.joined_worker FOLDER NAME RANK RANKS ACT ...`.

It says what it sees line by line and waits for stdin to close before it leaves, so a test can end it at any of its words.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from rondo.comm.partitions.joining import join
from rondo.runtime.processes.guard import die_with_parent


def say(word: Any) -> None:
    print(json.dumps(word), flush=True)


async def produce(folder: str, name: str, rank: int, ranks: int, first: int, num_rows: int) -> None:
    async with join(folder, name, rank=rank, ranks=ranks) as bus:
        part = bus.partition("p")
        for value in range(first, first + num_rows, 10):
            await part.put({"x": np.arange(value, value + 10)}, keys=[str(value + i) for i in range(10)])
        say("put")
        await asyncio.to_thread(sys.stdin.read)


async def consume(folder: str, name: str, rank: int, ranks: int, task: str, batch: int, dp_ranks: int) -> None:
    async with join(folder, name, rank=rank, ranks=ranks) as bus:
        say("joined")
        async for found in bus.partition("p").stream(task, columns=["x"], batch=batch, partial=True, ranks=dp_ranks):
            say([int(x) for x in found["x"]])
            found.ack()
        say("end")
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    die_with_parent()
    at, who, number, size, act, *rest = sys.argv[1:]
    values = [json.loads(word) for word in rest]
    asyncio.run({"produce": produce, "consume": consume}[act](at, who, int(number), int(size), *values))
