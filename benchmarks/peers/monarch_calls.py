"""Monarch's side of `benchmarks/calls.py`: run by an interpreter that has torchmonarch; prints one JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from monarch.actor import Actor, endpoint, this_host  # type: ignore[import-not-found]

NUM_WARM, NUM_SEQUENTIAL, NUM_PIPELINED, WINDOW = 300, 2000, 5_000, 500


class Counter(Actor):
    @endpoint
    async def inc(self, x: int) -> int:
        return x + 1


async def main() -> None:
    counter = this_host().spawn_procs(per_host={"gpus": 1}).spawn("counter", Counter)
    for i in range(NUM_WARM):
        assert await counter.inc.call_one(i) == i + 1
    seconds = []
    for i in range(NUM_SEQUENTIAL):
        start = time.perf_counter()
        await counter.inc.call_one(i)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    start = time.perf_counter()
    for _ in range(NUM_PIPELINED // WINDOW):
        await asyncio.gather(*[counter.inc.call_one(1) for _ in range(WINDOW)])
    calls_per_s = NUM_PIPELINED / (time.perf_counter() - start)
    p50_us, p99_us = (seconds[NUM_SEQUENTIAL * percent // 100] * 1e6 for percent in (50, 99))
    print(json.dumps({"p50_us": p50_us, "p99_us": p99_us, "calls_per_s": calls_per_s}))
    sys.stdout.flush()
    os._exit(0)  # its runtime threads outlive an ordinary end


if __name__ == "__main__":
    asyncio.run(main())
