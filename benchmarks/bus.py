"""The bus as roles use it: a replica leases and puts, a trainer streams rounds and commits, the coordinator journals.

    rondo bench bus [--repetitions 5] [--peers-python PEERS_VENV/bin/python]

Every process is real: the coordinator is `python -m rondo.comm.serve`, producers and consumers are processes of their own with a
`Bus`, memory is handed over as in a run (`benchmarks/bus_world.py`). A consumer reads both ends of every column of every row,
checks the round and commits the step.

- text: 64 rows a put, tokens, log-probs and versions of 256 to 4,096 tokens (28 kB a row); multimodal: 4 rows a put with float32
  pixel values (7 MB a row). "limit": one memcpy of a batch that lies in one piece into warm shared memory, and nothing else.
- CPU counts all processes of the bus: producers, consumers, coordinator and whoever hands memory over.
- latency: one row of 3 kB, from before its put until its values are under the hand of a consumer that waits for it.
- growth: lease, put, claim, get and commit of a step of 512 rows while 100,000 rows wait for their reader, against 1,000.
- the peer is TransferQueue's SimpleStorage, run by an interpreter that has it (`benchmarks/peers/transferqueue.py`):

    pip install torch==2.13.0 TransferQueue==0.1.11

Repetitions of all are interleaved; figures are medians, ratios the medians of ratios within a repetition. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.bus_world import MIB, Load, World, columns_of, multimodal, put_group, text, told, touch, world
from rondo.comm.bus import Bus
from rondo.comm.coordinator import ROLLOUT_READER

PEER = Path(__file__).parent / "peers" / "transferqueue.py"
SMALL = (16, 24)  # tokens of the rows that are held


@dataclass(frozen=True, slots=True)
class Rate:
    rows_s: float
    cpu_us_per_row: float = 0.0


def cpu_s(pids: list[int]) -> float:
    """User and system seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def throughput(load: Load) -> Rate:
    async with world(load) as made:
        readers = [made.start("consume", "actor-0", rank) for rank in range(load.consumers)]
        for i in range(load.producers):
            made.start("produce", f"rollout-{i}")
        lines = told(readers[0])
        warm = await asyncio.to_thread(next, lines)
        used = cpu_s(made.pids); per=[cpu_s([p]) for p in made.pids]
        end = await asyncio.to_thread(next, lines)
        used = cpu_s(made.pids) - used; per=[cpu_s([p])-b for p,b in zip(made.pids,per)]; print([round(x/((load.num_steps - load.warm_steps) * load.groups_per_step * load.samples_per_group)*1e6,1) for x in per], "main coord readers producers")
        rows = (load.num_steps - load.warm_steps) * load.groups_per_step * load.samples_per_group
        return Rate(rows / (end["at"] - warm["at"]), used / rows * 1e6)


def limit(load: Load) -> Rate:
    """One memcpy a put, round a ring of the same size."""
    pool, size = load.samples(load.pool), load.rows_per_put
    sources = [
        np.concatenate([row[name].reshape(-1).view(np.uint8) for name, _ in load.columns for row in pool[i : i + size]])
        for i in range(0, load.pool, size)
    ]
    target = np.ones(load.ring_bytes, np.uint8)
    count, at, started, used = 0, 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < 1.0:
        source = sources[count // size % len(sources)]
        if at + len(source) > len(target):
            at = 0
        target[at : at + len(source)] = source
        at += len(source)
        count += size
    took = time.perf_counter() - started
    return Rate(count / took, (time.process_time() - used) / count * 1e6)


async def latencies_us() -> tuple[float, float]:
    """p50 and p99 of one 3 kB row, put to readable."""
    load = Load("latency", 1, 1, 1, num_steps=1200, warm_steps=200, tokens=(256, 256), ring_bytes=16 * MIB)
    async with world(load) as made:
        reader = made.start("latency", "actor-0")
        made.start("produce_slowly", "rollout-0")
        end = await asyncio.to_thread(next, told(reader))
        p50, p99 = np.percentile(end["values"], [50, 99])
        return float(p50), float(p99)


# ---- many rows held -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """Seconds of one step of 512 small rows while `rows` wait."""

    rows: int
    put_s: float
    claim_s: float
    status_s: float
    memory_bytes: int


async def growth(few: int, many: int) -> tuple[Held, Held]:
    load = Load(
        "held", 8, 8, 64, num_steps=1 << 20, tokens=SMALL, ring_bytes=2 * (many + 4096) * 1024, max_staleness=1 << 20
    )
    async with world(load) as made:
        rollout, actor = await made.bus("rollout-0"), await made.bus("actor-0")
        await rollout.call("proved", ROLLOUT_READER, 0)
        await actor.join("actor", 1 << 18)
        rows = load.samples(load.samples_per_group)
        steps = [0, 0]
        found = []
        for target in (few, many):
            while (steps[1] - steps[0]) * 512 < target:
                await _put_step(rollout, load, rows)
                steps[1] += 1
            found.append(await _cycles(made, rollout, actor, rows, steps, target))
        return found[0], found[1]


async def _put_step(rollout: Bus, load: Load, rows: list[dict[str, np.ndarray]]) -> None:
    left = load.groups_per_step
    while left:
        for grant in (await rollout.call("lease", left, []))["grants"]:
            put_group(rollout, load, grant, rows)
            left -= 1
    await rollout.call("renew", [])  # the coordinator has seen every put


async def _cycles(
    made: World, rollout: Bus, actor: Bus, rows: list[dict[str, np.ndarray]], steps: list[int], target: int
) -> Held:
    put, claim, status = [], [], []
    for _ in range(15):
        started = time.perf_counter()
        await _put_step(rollout, made.load, rows)
        put.append(time.perf_counter() - started)
        started = time.perf_counter()
        ids: list[list[int]] = []
        async for part in actor.stream("actor", tokens=1 << 18, step=steps[0]):
            touch(part, made.load)
            actor.check(part)
            ids += part.spans
        await actor.call("commit", 0, steps[0] + 1, 7, ids)
        claim.append(time.perf_counter() - started)
        steps[0], steps[1] = steps[0] + 1, steps[1] + 1
        started = time.perf_counter()
        await made.ref().call("stats", deadline_s=60)
        status.append(time.perf_counter() - started)
    status_text = Path(f"/proc/{made.coordinator.pid}/statm").read_text()
    memory = int(status_text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(target, statistics.median(put), statistics.median(claim), statistics.median(status), memory)
