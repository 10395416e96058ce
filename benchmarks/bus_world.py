"""A whole bus for `benchmarks/bus.py`: the coordinator's process, a supervisor reduced to its memory and its roster, and the
processes at both ends. Run as a program it is one of those ends:

    python -m benchmarks.bus_world produce|consume|latency|echo '{"folder": ..., "member": "rollout-0", ...}'

A producer leases groups and puts them until the run ends; a consumer runs the rounds of every step, reads both ends of each
column of each row, commits, and prints one line of JSON when the warm-up is over and one at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop

from rondo.comm.bus.accounts import Rules
from rondo.comm.bus.bus import Bus, Round
from rondo.comm.bus.member import Member
from rondo.comm.bus.rounds import Stream
from rondo.comm.bus.serve import CONFIG
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.comm.bus.versions import engine_reader
from rondo.comm.ring.records import Column, worst_case_bytes
from rondo.comm.ring.words import Words, drain, ring_doorbell
from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient, SegmentServer

TOKEN = "benchmark"
TEXT = (("tokens", "int32"), ("rollout_log_probs", "float32"), ("policy_versions", "int32"))
MAX_TOKENS, PATCH = 4096, 1176
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What crosses the bus. `pixels`: most rows of pixel values a sample, 0 for text; `tokens`: shortest and longest row."""

    name: str
    rows_per_put: int
    samples_per_group: int
    groups_per_step: int
    num_steps: int
    warm_steps: int = 2
    tokens: tuple[int, int] = (256, MAX_TOKENS)
    pixels: tuple[int, int] = (0, 0)
    producers: int = 1
    consumers: int = 1
    ring_bytes: int = 256 * MIB
    max_staleness: int = 10_000
    packed: bool = True  # columns are put and read in one piece, as far as they have one dimension
    whole_step: bool = False  # a step is trained only when all of it is there

    @property
    def pool(self) -> int:
        """How many different rows a producer puts, over and over."""
        return max(4 * self.samples_per_group, 16)

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        return (*TEXT, ("pixel_values", "float32")) if self.pixels[1] else TEXT

    @property
    def row_bytes(self) -> int:
        """The worst case of a record with one row."""
        sizes = [(name, 4, self.tokens[1]) for name, _ in TEXT]
        if self.pixels[1]:
            sizes.append(("pixel_values", 4, self.pixels[1] * PATCH))
        return worst_case_bytes(1, sizes)

    def samples(self, count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
        """Rows with lengths as of real answers: log-normal, cut."""
        random = np.random.default_rng(seed)
        low, high = self.tokens
        lengths = np.clip(random.lognormal(np.log(2200), 0.8, count), low, high).astype(int)
        rows = [{name: np.ones(n, dtype) for name, dtype in TEXT} for n in lengths]
        if self.pixels[1]:
            for row, n in zip(rows, random.integers(*self.pixels, count), strict=True):
                row["pixel_values"] = np.ones((n, PATCH), np.float32)
        return rows


def text(rows_per_put: int = 64, **changes: Any) -> Load:
    fields = {"samples_per_group": 64, "groups_per_step": 16, "num_steps": 60, "warm_steps": 10}
    return Load(f"text, {rows_per_put} rows a put", rows_per_put, **{**fields, **changes})


def multimodal(**changes: Any) -> Load:
    fields = {"samples_per_group": 4, "groups_per_step": 4, "num_steps": 60, "warm_steps": 20, "ring_bytes": 512 * MIB}
    # Read an array a row, as a trainer packs them: in one piece the columns of a round of several groups would be copied first.
    return Load("multimodal, 4 rows a put", 4, pixels=(1300, 1700), packed=False, **{**fields, **changes})


class Roster(Actor):
    """The supervisor as the coordinator knows it."""

    @endpoint
    async def roster(self) -> dict[str, Any]:
        return {"attempt": 0, "draining": False, "groups": {}, "dead": []}

    @endpoint
    async def ready(self, group: str, incarnation: int, rank: int) -> None:
        pass

    @endpoint
    async def report(self, source: str, kind: str, data: dict[str, Any]) -> None:
        if kind == "fatal":
            raise SystemExit(data["cause"])


@dataclass
class World:
    """A running bus. `pids`: everything whose processor time counts."""

    folder: Path
    load: Load
    coordinator: subprocess.Popen[bytes]
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), self.coordinator.pid, *(child.pid for child in self.children)]

    def ref(self) -> ActorRef:
        made = ActorRef(f"unix:{self.folder}/coordinator.sock", token=TOKEN, peer="coordinator")
        self.opened.callback(made.close)
        return made

    def client(self) -> SegmentClient:
        made = SegmentClient(self.folder / "handover.sock", TOKEN)
        self.opened.callback(made.close)
        return made

    async def bus(
        self, member: str, ranks: int = 1, ref: ActorRef | None = None, segments: SegmentClient | None = None
    ) -> Bus:
        """A bus in this very process."""
        coordinator = ref or self.ref()
        await coordinator.call("member_started", member, 1, ranks, deadline_s=60, retry=True)
        made = Bus(Member(member, 1, 0, ranks, 0), coordinator, segments or self.client())
        await made.open()
        self.opened.callback(made.close)
        return made

    def start(self, what: str, member: str, rank: int = 0) -> subprocess.Popen[bytes]:
        options = {"folder": str(self.folder), "member": member, "rank": rank, "load": asdict(self.load)}
        command = [sys.executable, "-m", "benchmarks.bus_world", what, json.dumps(options)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.children.append(child)
        return child

    async def begin(self) -> None:
        """The members of the load exist, and version 0 does."""
        publisher = self.ref()
        for i in range(self.load.producers):
            await publisher.call("member_started", f"rollout-{i}", 1, 1, deadline_s=60, retry=True)
        await publisher.call("member_started", "actor-0", 1, self.load.consumers, deadline_s=60)
        await publisher.call("commit", "actor-0", 1, 0, 0, 7, [], deadline_s=60)


@contextlib.asynccontextmanager
async def world(load: Load) -> AsyncIterator[World]:
    rules = Rules(
        num_steps=load.num_steps, groups_per_step=load.groups_per_step, samples_per_group=load.samples_per_group,
        max_staleness=load.max_staleness, base_columns=tuple(name for name, _ in load.columns),
        streams=(Stream("actor", tuple(name for name, _ in load.columns), kind="train", whole_step=load.whole_step),),
        row_bytes=load.row_bytes,
    )  # fmt: skip
    replicas = tuple(f"rollout-{i}" for i in range(load.producers))
    config = CoordinatorConfig(
        rules=rules, publisher="actor-0", rollout_ring_bytes=load.ring_bytes, column_ring_bytes=MIB,
        rollout_groups=replicas, ranks=dict.fromkeys(replicas, 1) | {"actor-0": load.consumers},
        lease_deadline_s=600.0, evaluate_start=False, evaluate_end=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rondo-bench-") as name:
        folder = Path(name)
        (folder / "token").write_text(TOKEN)
        (folder / CONFIG).write_bytes(orjson.dumps(asdict(config)))
        segments = SegmentServer(folder / "handover.sock", TOKEN, lambda _: None)
        segments.start()
        supervisor = await serve(Roster(), f"unix:{folder}/supervisor.sock", token=TOKEN, name="supervisor")
        env = os.environ | {
            "RONDO_RT_DIR": name, "RONDO_RUN_DIR": name, "RONDO_ATTEMPT": "0", "RONDO_GROUP": "coordinator",
            "RONDO_INCARNATION": "1",
        }  # fmt: skip
        made = World(folder, load, _spawn(env))
        try:
            await made.begin()
            yield made
        finally:
            for child in made.children:
                child.kill()
                child.wait()
            made.opened.close()
            made.coordinator.kill()
            await asyncio.to_thread(made.coordinator.wait)  # it hangs up on this process, whose loop must hear it
            await supervisor.close()
            segments.close()


def _spawn(env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "rondo.comm.bus.serve"], env=env)


# ---- both ends ------------------------------------------------------------------------------------------------------


Batch = tuple[list[Column], list[list[float]]]
"""What one put carries: its columns, and what is said of its rows."""


def batches(load: Load, rows: Sequence[dict[str, np.ndarray]]) -> list[Batch]:
    """Rows, as many a put as the load says."""
    some = [rows[first : first + load.rows_per_put] for first in range(0, len(rows), load.rows_per_put)]
    return [(columns_of(load, each), [[len(row["tokens"]), 1, 1.0, 0, 0, 0] for row in each]) for each in some]


def columns_of(load: Load, rows: Sequence[dict[str, np.ndarray]]) -> list[Column]:
    """Each column in one piece, where the load says so and they have one dimension."""
    columns = []
    for name, dtype in load.columns:
        arrays = [row[name] for row in rows]
        if load.packed and arrays[0].ndim == 1:
            columns.append(Column(name, dtype, [np.concatenate(arrays)], [len(array) for array in arrays]))
        else:
            columns.append(Column(name, dtype, arrays))
    return columns


def put_group(bus: Bus, load: Load, grant: dict[str, Any], made: Sequence[Batch]) -> None:
    """All samples of a leased group, as many a put as the load says."""
    first = 0
    for columns, info in made:
        samples = range(first, first + len(info))
        bus.put_samples(grant["ring"], grant["group"], grant["epoch"], samples, columns, info)
        first += len(info)


def touch(made: Round, load: Load) -> int:
    """Read both ends of every column of every row; the number of rows."""
    for name, _ in load.columns:
        if load.packed:
            values, lengths = made.rows.packed(name)
            ends = np.cumsum(lengths)
            assert (values[ends - lengths] == 1).all() and (values[ends - 1] == 1).all()
        else:
            for row in made.rows:
                array = row.array(name)
                assert array.item(0) == array.item(-1) == 1
    return len(made.rows)


async def produce(bus: Bus, load: Load) -> None:
    """Asks for the next leases while it works on those that it has, as a replica does."""
    await bus.call("proved", engine_reader(0), 0)
    pool, per_group = batches(load, load.samples(load.pool)), load.samples_per_group // load.rows_per_put
    at = 0
    answer = await bus.call("lease", 4, [], deadline_s=600)
    while "grants" in answer:
        held = [[grant["group"], grant["epoch"]] for grant in answer["grants"]]
        asking = asyncio.create_task(bus.call("lease", 4, held, deadline_s=600))
        await asyncio.sleep(0)
        for grant in answer["grants"]:
            if at + per_group > len(pool):
                at = 0
            put_group(bus, load, grant, pool[at : at + per_group])
            at += per_group
        answer = await asking


async def consume(bus: Bus, load: Load, segments: SegmentClient) -> None:
    rows = 0
    settling: asyncio.Task[Any] | None = None
    read = Words(segments.segment("read", 4096).view(), 0, load.consumers)
    for step in range(load.num_steps):
        if step == load.warm_steps:
            tell("warm", rows)
        ids: list[list[int]] = []
        then = step + 1 if step + 1 < load.num_steps else None
        async for made in bus.stream("actor", tokens=1 << 18, step=step, then=then):
            rows += touch(made, load)
            bus.check(made)
            ids += made.spans
        if load.consumers == 1:  # a step is committed beside the rounds of the next one, as in `roles/actor.py`
            if settling is not None:
                await settling
            settling = asyncio.create_task(bus.call("commit", 0, step + 1, 7, ids))
        else:  # the ranks of a real trainer gather what they read; here the step is known to be whole
            first = step * load.groups_per_step
            whole = [[g, 0, 0, load.samples_per_group] for g in range(first, first + load.groups_per_step)]
            read.store(bus.member.rank, step + 1)  # the collectives of a real trainer wait for every rank
            if bus.member.rank == 0:
                while min(read.load(rank) for rank in range(load.consumers)) <= step:  # noqa: ASYNC110
                    await asyncio.sleep(0.0002)
                await bus.call("commit", 0, step + 1, 7, whole)
            await bus.call("await_version", step + 1)
    if settling is not None:
        await settling
    tell("end", rows)


async def latency(bus: Bus, load: Load, segments: SegmentClient) -> None:
    """The consumer of single rows: each carries the moment of its put in its first token columns."""
    seen: list[float] = []
    asked = Words(segments.segment("asked", 4096).view(), 0, 1)
    for step in range(load.num_steps):
        ids: list[list[int]] = []
        asked.store(0, step + 1)
        async for made in bus.stream("actor", tokens=1 << 18, step=step):
            (row,) = made.rows
            sent, last = int(row.array("policy_versions").view(np.int64)[0]), row.array("tokens")[-1]
            if step >= load.warm_steps:
                seen.append((time.monotonic_ns() - sent) / 1e3)
            assert last == 1
            bus.check(made)
            ids += made.spans
        await bus.call("commit", 0, step + 1, 7, ids)
    tell("end", len(seen), seen)


async def produce_slowly(bus: Bus, load: Load, segments: SegmentClient) -> None:
    """One row a time, a moment after everything is idle: not before its consumer has done with the one before."""
    asked = Words(segments.segment("asked", 4096).view(), 0, 1)
    await bus.call("proved", engine_reader(0), 0)
    (row,) = load.samples(1)
    stamp = row["policy_versions"].view(np.int64)
    made = batches(replace(load, packed=False), [row])  # of the very memory of the row
    while "grants" in (answer := await bus.call("lease", 1, [], deadline_s=600)):
        for grant in answer["grants"]:
            while asked.load(0) <= grant["step"]:  # noqa: ASYNC110 - a word in memory has no event
                await asyncio.sleep(0.0002)
            await asyncio.sleep(0.001)
            stamp[0] = time.monotonic_ns()
            put_group(bus, load, grant, made)


async def echo(load: Load, segments: SegmentClient, *, answers: bool) -> None:
    """One end of a bare echo: a doorbell that wakes one loop, which rings another that wakes the asking one."""
    for name in ("there", "back"):
        segments.segment(name, 4096)
    there, back = segments.doorbell("there"), segments.doorbell("back")
    heard, rung = (there, back) if answers else (back, there)
    woken = asyncio.Event()

    def wake() -> None:
        drain(heard)
        if answers:
            ring_doorbell(rung)
        woken.set()

    asyncio.get_running_loop().add_reader(heard, wake)
    seen: list[float] = []
    while answers or len(seen) < load.num_steps:
        await asyncio.sleep(0.001)
        woken.clear()
        sent = time.monotonic_ns()
        if not answers:
            ring_doorbell(rung)
        await woken.wait()
        seen.append((time.monotonic_ns() - sent) / 1e3)
    tell("end", len(seen), seen[load.warm_steps :])


def tell(what: str, rows: int, values: Sequence[float] = ()) -> None:
    sys.stdout.buffer.write(orjson.dumps({"what": what, "rows": rows, "at": time.monotonic(), "values": list(values)}))
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def told(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """What a consumer tells, as it comes."""
    assert child.stdout is not None
    for line in child.stdout:
        yield orjson.loads(line)


async def _end(what: str, options: dict[str, Any]) -> None:
    fields = options["load"]
    load = Load(**{**fields, "tokens": tuple(fields["tokens"]), "pixels": tuple(fields["pixels"])})
    folder = Path(options["folder"])
    coordinator = ActorRef(f"unix:{folder}/coordinator.sock", token=TOKEN, peer="coordinator")
    segments = SegmentClient(folder / "handover.sock", TOKEN)
    ranks = load.consumers if options["member"] == "actor-0" else 1
    bus = Bus(Member(options["member"], 1, options["rank"], ranks, 0), coordinator, segments)
    await bus.open()
    if what != "produce":  # every page of a ring is mapped once in a process; not what is measured
        for i in range(load.producers):
            np.frombuffer(segments.segment(f"ring/rollout-{i}/0", load.ring_bytes).view(readonly=True), np.uint8)[
                ::4096
            ].sum()
    if what == "consume":
        await consume(bus, load, segments)
    elif what in ("echo", "answer"):
        await echo(load, segments, answers=what == "answer")
    elif what == "produce":
        await produce(bus, load)
    else:
        await {"latency": latency, "produce_slowly": produce_slowly}[what](bus, load, segments)
    bus.close()
    segments.close()
    coordinator.close()


if __name__ == "__main__":
    uvloop.run(_end(sys.argv[1], json.loads(sys.argv[2])))
