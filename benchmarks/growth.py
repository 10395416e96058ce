"""What a partition's acts cost as more rows are held: put, claim, get, acknowledge and clear with 1,000 and with 100,000 rows,
in turn, in one run; what the status costs; what a put costs while a reader waits.

    rondo bench growth [--few 1000] [--many 100000] [--cycles 300] [--rows-a-put 64]

The coordinator is a process of its own with its journal on; rows are three jagged columns of about 0.8 kB, all of them unread by
one task and ready for another, which takes the oldest while new ones are put, so that as many stay held. A put is timed until
its rows can be read by key. The last line is JSON: `growth_100k` is the worst ratio of medians among the acts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from rondo.comm.partitions.client import Partition
from rondo.comm.partitions.host import Host
from rondo.comm.partitions.joining import join
from rondo.comm.partitions.stream import Stream

Times = dict[str, list[float]]


class Side:
    """One partition that holds so many rows, seen by its producer, by its reader, and by somebody who asks by key: apart, since a
    process keeps the last records that it has read."""

    def __init__(self, writer: Partition, reader: Partition, asker: Partition, num_rows: int, rows_a_put: int) -> None:
        self.writer, self.reader, self.asker = writer, reader, asker
        self.num_rows, self.rows_a_put = num_rows, rows_a_put
        self.times: Times = {name: [] for name in ("put", "claim", "get", "ack and clear")}
        self._next = 0
        self._stream: Stream = reader.stream("t", columns=["tokens"], batch=rows_a_put)
        lengths = np.random.default_rng(0).integers(32, 97, rows_a_put)
        fields = (("tokens", "int32"), ("log_probs", "float32"), ("versions", "int32"))
        self._columns = {name: [np.ones(n, dtype) for n in lengths] for name, dtype in fields}

    async def fill(self) -> None:
        """Hold the rows; the other task waits for a column that nobody adds."""
        await self.writer.opened()
        await self.reader.stream("other", columns=["absent"]).open()
        while self._next < self.num_rows:
            await self.put()
        await self._stream.open()
        await self.reader.list(limit=1)

    async def put(self) -> list[str]:
        keys = [str(self._next + i) for i in range(self.rows_a_put)]
        self._next += self.rows_a_put
        await self.writer.put(self._columns, keys)
        return keys

    async def cycle(self, *, keep: bool = True) -> None:
        started = time.perf_counter()
        keys = await self.put()
        await self.writer.get(keys[-1:], ["tokens"], copy=False, wait=True)
        put = time.perf_counter()
        batch = await self._stream.next()
        assert batch is not None
        claimed = time.perf_counter()
        found = await self.asker.get(keys, ["tokens", "versions"], copy=False)
        found.arrays("tokens")
        got = time.perf_counter()
        batch.ack()
        await self.reader.clear(batch.ids)
        cleared = time.perf_counter()
        if keep:
            took = (put - started, claimed - put, got - claimed, cleared - got)
            for name, seconds in zip(self.times, took, strict=True):
                self.times[name].append(seconds)


async def cycles(sides: list[Side], count: int) -> None:
    for at in range(count + 20):
        for side in sides if at % 2 else reversed(sides):
            await side.cycle(keep=at >= 20)


async def each_us(act: Callable[[], Awaitable[Any]], count: int) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await act()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


async def put_while_waiting(side: Side, count: int) -> float:
    """A put until it can be read, with a reader that waits for more rows than come, against the same without; in turn."""

    async def put_and_see() -> None:
        keys = await side.put()
        await side.writer.get(keys[-1:], ["tokens"], copy=False, wait=True)

    ratios = []
    for _ in range(5):
        alone = await each_us(put_and_see, count)
        waiting = asyncio.create_task(side.reader.stream("waiting", columns=["tokens"], batch=1 << 30).next())
        await side.reader.list(limit=1)
        ratios.append(await each_us(put_and_see, count) / alone)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    return statistics.median(ratios)


async def run(few: int, many: int, count: int, rows_a_put: int) -> dict[str, Any]:
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rondo-bench-"))) / "bus"
        await opened.enter_async_context(Host(folder))
        members = [await opened.enter_async_context(join(folder, name)) for name in ("writer", "reader", "asker")]
        writer, reader, asker = members
        size = max(512 << 20, 4000 * many)
        parts = [
            (
                writer.partition(name, capacity_bytes=size, chunk_bytes=32 << 20),
                reader.partition(name),
                asker.partition(name),
            )
            for name in ("few", "many", "waits")
        ]
        sides = [Side(*part, held, rows_a_put) for part, held in zip(parts, (few, many, few), strict=True)]
        started = time.perf_counter()
        for side in sides:
            await side.fill()
        print(f"filled {few:,} and {many:,} rows in {time.perf_counter() - started:.1f} s")
        await cycles(sides[:2], count)

        async def status() -> None:
            sides[1].reader.stats()

        status_us = await each_us(status, 2000)
        waiting = await put_while_waiting(sides[2], 100)
    ratios = {}
    print(f"\n{'act':14} {few:>10,} rows held {many:>10,} rows held   ratio     (us, {rows_a_put} rows each)")
    for name in sides[0].times:
        low, high = (statistics.median(side.times[name]) * 1e6 for side in sides[:2])
        ratios[name] = high / low
        print(f"{name:14} {low:20.1f} {high:20.1f} {high / low:7.2f}")
    print(f"status of {many:,} rows: {status_us:.1f} us; a put while a reader waits: {waiting:.2f} of a put")
    return {
        "benchmark": "growth", "few": few, "many": many, "rows_a_put": rows_a_put,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "growth_100k": round(max(ratios.values()), 3), "status_100k_ms": round(status_us / 1e3, 4),
        "put_while_waiting": round(waiting, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=1_000)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--rows-a-put", type=int, default=64)
    arguments = parser.parse_args()
    print(json.dumps(uvloop.run(run(arguments.few, arguments.many, arguments.cycles, arguments.rows_a_put))))


if __name__ == "__main__":
    main()
