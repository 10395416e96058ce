"""A role's process that uses one partition: `python -m tests.comm.partitions.worker FOLDER GROUP ACT ...`.

It speaks by lines on stdout and waits for stdin to close before it ends, so a test can kill it at any of its words.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from rondo.comm.bus.member import Member
from rondo.comm.partitions.client import Partition, Partitions
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes.process import die_with_parent
from tests.comm.partitions.world import TOKEN


def say(word: Any) -> None:
    print(json.dumps(word), flush=True)


async def produce(part: Partition, start: int, num_rows: int, rows_a_put: int) -> None:
    for first in range(start, start + num_rows, rows_a_put):
        values = np.arange(first, first + rows_a_put)
        await part.put({"x": values}, keys=[str(value) for value in values], groups=int(first))
    say("put")


async def consume(part: Partition, task: str, batch: int, most: int, rank: int, ranks: int) -> None:
    """Say every batch before it is acknowledged; stop after `most` rows without acknowledging the last batch."""
    num_rows = 0
    async for found in part.stream(task, columns=["x"], batch=batch, rank=rank, ranks=ranks, partial=True):
        say([int(value) for value in found["x"]])
        num_rows += len(found)
        if num_rows >= most:
            return
        found.ack()
    say("end")


async def main(folder: str, group: str, incarnation: int, act: str, arguments: list[Any]) -> None:
    coordinator = ActorRef(f"unix:{folder}/partitions.sock", token=TOKEN, peer="partitions")
    segments = SegmentClient(f"{folder}/handover.sock", TOKEN)
    bus = Partitions(Member(group, incarnation, 0, 1, 0), coordinator, segments)
    part = bus.partition("p")
    await part.opened()
    say("open")
    await {"produce": produce, "consume": consume}[act](part, *arguments)
    await asyncio.to_thread(sys.stdin.read)
    bus.close()
    coordinator.close()
    segments.close()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5])))
