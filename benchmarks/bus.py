"""The bus as roles use it: a replica leases and puts, a trainer streams rounds and commits, the coordinator journals.

    rondo bench bus [--repetitions 5] [--peers-python PEERS_VENV/bin/python]

Every process is real: the coordinator is `python -m rondo.comm.bus.serve`, producers and consumers are processes of their own
with a `Bus`, memory is handed over as in a run (`benchmarks/bus_world.py`). A consumer reads both ends of every column of
every row, checks the round and commits the step.

- text: 64 rows a put, tokens, log-probs and versions of 256 to 4,096 tokens (28 kB a row), each column put and read in one
  piece, and again from and into an array a row; multimodal: 4 rows a put with float32
  pixel values (7 MB a row). "limit": one memcpy of a batch that lies in one piece into warm shared memory, and nothing else.
- CPU counts all processes of the bus: producers, consumers, coordinator and whoever hands memory over.
- latency: one row of 3 kB, from before its put until its values are under the hand of a consumer that waits for it; beside it
  an echo between two processes that do nothing but ring each other's doorbell (`row_p50_of_floor`).
- growth: lease, put, claim, get and commit of a step of 512 rows while 100,000 rows wait for their reader, against 1,000.
- coordinator, put: processor time of the coordinator for one sample's put, 1,024 prompt groups open, 64 ranks waiting for rounds
  and a replica for a lease, every eighth put completing its group (`put_cost_ms`).
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks.bus_world import (
    MIB,
    Batch,
    Load,
    World,
    batches,
    columns_of,
    multimodal,
    put_group,
    text,
    told,
    touch,
    world,
)
from rondo.comm.bus.bus import Bus
from rondo.comm.bus.versions import engine_reader
from rondo.runtime.memory.segments import Segment

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
        used = cpu_s(made.pids)
        end = await asyncio.to_thread(next, lines)
        used = cpu_s(made.pids) - used
        rows = (load.num_steps - load.warm_steps) * load.groups_per_step * load.samples_per_group
        return Rate(rows / (end["at"] - warm["at"]), used / rows * 1e6)


def limit(load: Load) -> Rate:
    """One memcpy a put, round a ring of the same size."""
    pool, size = load.samples(load.pool), load.rows_per_put
    sources = [
        np.concatenate([row[name].reshape(-1).view(np.uint8) for name, _ in load.columns for row in pool[i : i + size]])
        for i in range(0, load.pool, size)
    ]
    segment = Segment("limit", load.ring_bytes, os.memfd_create("limit"))
    os.posix_fallocate(segment.fd, 0, load.ring_bytes)
    target = np.frombuffer(segment.view(), np.uint8)
    target[:] = 0
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


async def latencies_us() -> tuple[float, float, float]:
    """p50 and p99 of one 3 kB row, put to readable; p50 of a bare echo through two doorbells after it."""
    load = Load("latency", 1, 1, 1, num_steps=1200, warm_steps=200, tokens=(256, 256), ring_bytes=16 * MIB)
    async with world(load) as made:
        reader = made.start("latency", "actor-0")
        made.start("produce_slowly", "rollout-0")
        end = await asyncio.to_thread(next, told(reader))
        p50, p99 = np.percentile(end["values"], [50, 99])
        made.start("answer", "rollout-0")
        end = await asyncio.to_thread(next, told(made.start("echo", "actor-0")))
        return float(p50), float(p99), float(np.percentile(end["values"], 50))


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
        await rollout.call("proved", engine_reader(0), 0)
        await actor.join("actor", 1 << 18)
        rows = batches(load, load.samples(load.samples_per_group))
        steps = [0, 0]
        found = []
        for target in (few, many):
            while (steps[1] - steps[0]) * 512 < target:
                await _put_step(rollout, load, rows)
                steps[1] += 1
            found.append(await _cycles(made, rollout, actor, rows, steps, target))
        return found[0], found[1]


async def _put_step(rollout: Bus, load: Load, rows: list[Batch]) -> None:
    left = load.groups_per_step
    while left:
        for grant in (await rollout.call("lease", left, []))["grants"]:
            put_group(rollout, load, grant, rows)
            left -= 1
    await rollout.call("renew", [])  # the coordinator has seen every put


async def _cycles(made: World, rollout: Bus, actor: Bus, rows: list[Batch], steps: list[int], target: int) -> Held:
    put, claim, status, coordinator = [], [], [], made.ref()
    await coordinator.call("stats", deadline_s=60)
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
        await coordinator.call("stats", deadline_s=60)
        status.append(time.perf_counter() - started)
    memory = psutil.Process(made.coordinator.pid).memory_info().rss
    return Held(target, statistics.median(put), statistics.median(claim), statistics.median(status), memory)


async def put_while_waiting() -> float:
    """Seconds of a put while a consumer waits for it, over those of a put that nobody waits for."""
    load = text(8, samples_per_group=8, groups_per_step=400, num_steps=1 << 20)
    async with world(load) as made:
        rollout, actor = await made.bus("rollout-0"), await made.bus("actor-0")
        await rollout.call("proved", engine_reader(0), 0)
        await actor.join("actor", 1 << 18)
        rows, waiting = batches(load, load.samples(load.samples_per_group)), False
        found: dict[bool, list[float]] = {True: [], False: []}
        index = 0
        for _ in range(200):
            (grant,) = (await rollout.call("lease", 1, []))["grants"]
            asking = None
            if waiting:
                asking = asyncio.create_task(actor.call("next_rounds", "actor", 0, index, 0, deadline_s=60))
            await asyncio.sleep(0.002)  # it has arrived at the coordinator; where there is none, caches are as cold
            started = time.perf_counter()
            put_group(rollout, load, grant, rows)
            found[waiting].append(time.perf_counter() - started)
            if asking is None:
                asking = asyncio.create_task(actor.call("next_rounds", "actor", 0, index, 0, deadline_s=60))
            await asking
            index, waiting = index + 1, not waiting
        return statistics.median(found[True]) / statistics.median(found[False])


async def replicas_cost_us(count: int) -> float:
    """Processor time of the coordinator a prompt group, with this many replicas that ask, put and renew, one after another."""
    load = Load(
        "replicas", 8, 8, 1024, num_steps=64, tokens=SMALL, ring_bytes=(2000 // count + 8) * 16384, producers=count
    )
    async with world(load) as made:
        ref = made.ref()
        segments = made.client()
        replicas = [await made.bus(f"rollout-{i}", ref=ref, segments=segments) for i in range(count)]
        for replica in replicas:
            await replica.call("proved", engine_reader(0), 0)
        rows = batches(load, load.samples(load.samples_per_group))
        waiting = [asyncio.create_task(replica.call("lease", 1, [], deadline_s=600)) for replica in replicas]
        used, done = cpu_s([made.coordinator.pid]), 0
        while done < 2000:
            for i, replica in enumerate(replicas):
                for grant in (await waiting[i])["grants"]:
                    put_group(replica, load, grant, rows)
                    await replica.call("renew", [])
                    done += 1
                waiting[i] = asyncio.create_task(replica.call("lease", 1, [], deadline_s=600))
        used = cpu_s([made.coordinator.pid]) - used
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return used / done * 1e6


async def put_cost_ms(num_groups: int, num_ranks: int, *, whole_step: bool, num_puts: int | None = None) -> float:
    """Processor time of the coordinator for the put of one sample, with a step of this many prompt groups of eight leased to a
    replica that asks for more, and a trainer's ranks that wait for rounds of it: the means over all puts of the step, so that
    every eighth completes its group. With `whole_step` nobody is answered before the last put; without, every group that is
    complete becomes a round, and every rank is told its part and asks again. A call that changes nothing follows each put, so
    that none is seen together with the next; what such calls cost by themselves is taken off."""
    load = Load(
        "waiting", 1, 8, num_groups, num_steps=2, tokens=SMALL, ring_bytes=num_groups * 16384, consumers=num_ranks,
        max_staleness=0, whole_step=whole_step,
    )  # fmt: skip
    async with world(load) as made:
        rollout, actor = await made.bus("rollout-0"), await made.bus("actor-0", num_ranks)
        await rollout.call("proved", engine_reader(0), 0)
        await actor.join("actor", 1 << 18)
        grants: list[dict[str, Any]] = []
        while len(grants) < num_groups:
            held = [[grant["group"], grant["epoch"]] for grant in grants]
            grants += (await rollout.call("lease", num_groups, held))["grants"]
        held = [[grant["group"], grant["epoch"]] for grant in grants]
        asking = asyncio.create_task(rollout.call("lease", 1, held, deadline_s=600))

        async def rank(number: int) -> None:
            index = 0
            while "rounds" in (answer := await actor.call("next_rounds", "actor", number, index, 0, deadline_s=600)):
                index += len(answer["rounds"])
                if answer["rounds"][-1]["last"]:
                    return

        ranks = [asyncio.create_task(rank(number)) for number in range(num_ranks)]
        rows = load.samples(1)
        # Sample j of group i is the (i + j * groups / 8)th or so: groups are completed one by one, all along the step.
        order = sorted((i + j * num_groups // 8, i, j) for i in range(num_groups) for j in range(8))
        order = order[:num_puts]
        idle = cpu_s([made.coordinator.pid])
        for _ in order:
            await rollout.call("renew", [])
        begun = cpu_s([made.coordinator.pid])
        for _, i, j in order:
            info = [[len(rows[0]["tokens"]), 8, 1.0, 0, 0, 0, 1.0]]
            rollout.put_samples(grants[i]["ring"], grants[i]["group"], 0, [j], columns_of(load, rows), info)
            await rollout.call("renew", [])
        used = cpu_s([made.coordinator.pid])
        for task in (asking, *ranks):
            task.cancel()
        await asyncio.gather(asking, *ranks, return_exceptions=True)
        return ((used - begun) - (begun - idle)) / len(order) * 1e3


# ---- the peer, and the table ----------------------------------------------------------------------------------------


def peer_rates(python: str | None, loads: dict[str, Load]) -> dict[str, Rate]:
    """TransferQueue on the same rows, as warm and as many; empty where it is not installed."""
    if python is None:
        return {}
    tasks = {}
    for name, load in loads.items():
        rows, a_step = load.samples(load.pool), load.groups_per_step * load.samples_per_group // load.rows_per_put
        tasks[name] = {
            "lengths": [len(row["tokens"]) for row in rows], "rows_per_put": load.rows_per_put, "puts_per_step": a_step,
            "warm_puts": load.warm_steps * a_step, "puts": (load.num_steps - load.warm_steps) * a_step,
        }  # fmt: skip
        if load.pixels[1]:
            tasks[name]["pixels"] = [len(row["pixel_values"]) for row in rows]
    command = [python, str(PEER), json.dumps(tasks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        print(f"TransferQueue did not run: {done.stderr.strip().splitlines()[-1:]}")
        return {}
    return {name: Rate(**rate) for name, rate in json.loads(done.stdout.splitlines()[-1]).items()}


def middle(values: list[float]) -> float:
    return statistics.median(values)


def line(name: str, rates: list[Rate], bound: list[Rate] | None = None) -> None:
    values = sorted(rate.rows_s for rate in rates)
    cpu = middle([rate.cpu_us_per_row for rate in rates])
    share = f"{middle([r.rows_s / b.rows_s for r, b in zip(rates, bound, strict=True)]):8.0%}" if bound else " " * 8
    print(
        f"  {name:34} {middle(values):11,.0f} ({values[0]:,.0f} to {values[-1]:,.0f}) {cpu:10.1f} {share}", flush=True
    )


async def run(arguments: argparse.Namespace) -> None:
    loads = {
        "text": text(num_steps=110),
        "mm": multimodal(),
        "one": text(1, num_steps=34, warm_steps=4, tokens=(256, 256)),
        "rows": text(num_steps=110, packed=False),
        "many": text(producers=4, consumers=4, num_steps=70),
    }
    rates: dict[str, list[Rate]] = {name: [] for name in (*loads, "limit text", "limit mm", "tq text", "tq mm")}
    delays: list[tuple[float, float, float]] = []
    held: list[tuple[Held, Held]] = []
    puts: list[float] = []
    for _ in range(arguments.repetitions):
        for name, load in loads.items():
            rates[name].append(await throughput(load))
        rates["limit text"].append(limit(loads["text"]))
        rates["limit mm"].append(limit(loads["mm"]))
        peer = peer_rates(arguments.peers_python, {name: loads[name] for name in ("text", "mm")})
        for name, rate in peer.items():
            rates[f"tq {name}"].append(rate)
        delays.append(await latencies_us())
        held.append(await growth(1000, arguments.held))
        puts.append(await put_while_waiting())
    waiting = [await put_cost_ms(1024, 64, whole_step=whole) for whole in (True, False)]
    cost = {count: await replicas_cost_us(count) for count in arguments.replicas}

    print(f"{'':36} {'rows/s (least to most)':>34} {'CPU us/row':>12} {'of limit':>8}")
    line("text, 64 rows a put", rates["text"], rates["limit text"])
    line("text, an array a row", rates["rows"], rates["limit text"])
    line("text, four producers and consumers", rates["many"], rates["limit text"])
    line("text, limit: one memcpy", rates["limit text"])
    line("multimodal, 4 rows a put", rates["mm"], rates["limit mm"])
    line("multimodal, limit: one memcpy", rates["limit mm"])
    line("3 kB rows, one a put", rates["one"])
    for name in ("text", "mm"):
        if rates[f"tq {name}"]:
            line(f"TransferQueue, {name}", rates[f"tq {name}"])
    p50, p99, bare = (middle(list(values)) for values in zip(*delays, strict=True))
    of_floor = middle([row / echo for row, _, echo in delays])
    few, many = zip(*held, strict=True)
    ratio = middle([max(b.put_s / a.put_s, b.claim_s / a.claim_s) for a, b in held])
    memory = middle([(b.memory_bytes - a.memory_bytes) / (b.rows - a.rows) for a, b in held])
    status_ms = middle([b.status_s for b in many]) * 1e3
    print(f"  one 3 kB row, put to readable: p50 {p50:.0f} us, p99 {p99:.0f} us; a bare echo p50 {bare:.0f} us")
    print(
        f"  a step of 512 rows, {few[0].rows:,} held: put {middle([a.put_s for a in few]) * 1e3:.2f} ms, claim to commit "
        f"{middle([a.claim_s for a in few]) * 1e3:.2f} ms; {many[0].rows:,} held: "
        f"{middle([b.put_s for b in many]) * 1e3:.2f} and {middle([b.claim_s for b in many]) * 1e3:.2f} ms; "
        f"{memory:,.0f} bytes of the coordinator a row held; status {status_ms:.2f} ms"
    )
    print(f"  a put while a consumer waits, over one without: {middle(puts):.2f}")
    print(
        f"  coordinator, ms of processor time a put of one sample, 1,024 prompt groups open, 64 ranks that wait: "
        f"{waiting[0]:.3f}, and {waiting[1]:.3f} where they get a round of every group"
    )
    print("  coordinator, us a prompt group: " + ", ".join(f"{count} replicas {us:.0f}" for count, us in cost.items()))

    def versus(name: str) -> float | None:
        pairs = zip(rates[name], rates[f"tq {name}"], strict=False)
        return round(middle(found), 1) if (found := [ours.rows_s / theirs.rows_s for ours, theirs in pairs]) else None

    def share(name: str) -> float:
        return round(middle([r.rows_s / b.rows_s for r, b in zip(rates[name], rates[f"limit {name}"], strict=True)]), 3)

    figures: dict[str, Any] = {
        "text_rows_s": round(middle([rate.rows_s for rate in rates["text"]])),
        "text_cpu_us_per_row": round(middle([rate.cpu_us_per_row for rate in rates["text"]]), 2),
        "text_vs_transferqueue": versus("text"),
        "text_of_limit": share("text"),
        "rows_rows_s": round(middle([rate.rows_s for rate in rates["rows"]])),
        "rows_cpu_us_per_row": round(middle([rate.cpu_us_per_row for rate in rates["rows"]]), 2),
        "mm_rows_s": round(middle([rate.rows_s for rate in rates["mm"]])),
        "mm_of_limit": share("mm"),
        "mm_vs_transferqueue": versus("mm"),
        "row_p50_us": round(p50, 1),
        "row_p99_us": round(p99, 1),
        "row_p50_of_floor": round(of_floor, 2),
        "stream_rows_s": round(middle([rate.rows_s for rate in rates["one"]])),
        "many_rows_s": round(middle([rate.rows_s for rate in rates["many"]])),
        "growth_100k": round(ratio, 3),
        "status_100k_ms": round(status_ms, 3),
        "put_while_waiting": round(middle(puts), 3),
        "held_bytes_per_row": round(memory),
        "coordinator_put_ms_1024": round(waiting[0], 3),
        "coordinator_put_and_answer_ms_1024": round(waiting[1], 3),
        "coordinator_us_per_group": {str(count): round(us, 1) for count, us in cost.items()},
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--held", type=int, default=100_000, help="rows that wait, against 1,000")
    parser.add_argument("--replicas", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--peers-python", help="an interpreter that has TransferQueue")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
