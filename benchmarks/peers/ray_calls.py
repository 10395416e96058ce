"""Ray's side of `benchmarks/calls.py`: run by an interpreter that has ray; prints its figures as one JSON line."""

from __future__ import annotations

import json
import time

import ray  # type: ignore[import-not-found]

NUM_WARM, NUM_SEQUENTIAL, NUM_PIPELINED, WINDOW = 500, 2000, 10_000, 500


class Counter:
    async def inc(self, x: int) -> int:
        return x + 1


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=200 << 20)
    counter = ray.remote(Counter).remote()
    for i in range(NUM_WARM):
        assert ray.get(counter.inc.remote(i)) == i + 1
    seconds = []
    for i in range(NUM_SEQUENTIAL):
        start = time.perf_counter()
        ray.get(counter.inc.remote(i))
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    start = time.perf_counter()
    for _ in range(NUM_PIPELINED // WINDOW):
        ray.get([counter.inc.remote(1) for _ in range(WINDOW)])
    calls_per_s = NUM_PIPELINED / (time.perf_counter() - start)
    ray.shutdown()
    p50_us, p99_us = (seconds[NUM_SEQUENTIAL * percent // 100] * 1e6 for percent in (50, 99))
    print(json.dumps({"p50_us": p50_us, "p99_us": p99_us, "calls_per_s": calls_per_s}))


if __name__ == "__main__":
    main()
