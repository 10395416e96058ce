"""A real coordinator, real rings and real buses in one process, joined by direct calls: for tests that need thousands of runs.

Owns the memory (memfds, kept across a coordinator's death and across `fork`) and a wire that is only JSON. The supervisor is
a roster. Everything else is the product's own: index, journal, rings, rounds, `Bus`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rondo.comm.bus.bus import Bus, Round
from rondo.comm.bus.coordinator import Coordinator
from rondo.comm.bus.group import NO_VERSION
from rondo.comm.bus.journal import Journal
from rondo.comm.bus.member import Member
from rondo.comm.bus.serve import open_index
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.comm.ring.records import Column, worst_case_bytes
from rondo.comm.ring.words import new_doorbell
from rondo.runtime.actors.transport import pack, unpack
from rondo.runtime.memory.segments import Segment
from tests.comm.driver import rules

LENGTH, RESPONSE = 6, 4


def row_bytes(parts: int = 1) -> int:
    """The most that a sample of so many parts takes in a ring."""
    return worst_case_bytes(parts, [("tokens", 4, LENGTH), ("loss_mask", 1, RESPONSE)])


MEMBERS = ("rollout-0", "rollout-1", "actor_fwd-0", "advantages-0", "actor-0")


class Store:
    """Named memory and doorbells that outlive whoever opened them, as the supervisor's do."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, int]] = {}

    def segment(self, name: str, num_bytes: int) -> Any:
        if name not in self.held:
            fd = os.memfd_create(name.replace("/", "-"), os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, num_bytes)
            self.held[name] = fd, new_doorbell()
        fd = os.dup(self.held[name][0])
        return Segment(name, os.fstat(fd).st_size, fd)

    def doorbell(self, name: str) -> int:
        return os.dup(self.held[name][1])

    def drop(self, name: str) -> None:
        for fd in self.held.pop(name, ()):
            os.close(fd)

    def close(self) -> None:
        for name in list(self.held):
            self.drop(name)


class Wire:
    """Calls the coordinator of the moment as a socket would: everything goes through its form on the wire, both ways."""

    peer = "coordinator"

    def __init__(self, run: InProcess) -> None:
        self._run = run

    async def call(self, method: str, *args: Any, deadline_s: float = 60.0, retry: bool = False) -> Any:
        answer = await getattr(self._run.coordinator, method)(*orjson.loads(orjson.dumps(args)))
        header, buffers = pack(answer)
        return unpack(header, [memoryview(bytes(buffer)) for buffer in buffers])


class Roster:
    def __init__(self) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        self.dead: list[list[Any]] = []
        self.draining = False

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        return {"attempt": 0, "draining": self.draining, "groups": self.groups, "dead": self.dead}


class InProcess:
    def __init__(self, folder: Path, store: Store, *, ring_bytes: int = 1 << 14, **changes: Any) -> None:
        self.folder, self.store, self.roster, self.clock = folder, store, Roster(), 0.0
        self.attempt = 0
        self.config = CoordinatorConfig(
            rules=rules(**{"row_bytes": row_bytes(), **changes}), publisher="actor-0", rollout_ring_bytes=ring_bytes,
            column_ring_bytes=ring_bytes, rollout_groups=("rollout-0", "rollout-1"),
            ranks=dict.fromkeys((*MEMBERS, "critic-0"), 1),
            lease_deadline_s=100.0, evaluate_start=False, evaluate_end=False,
        )  # fmt: skip
        self.coordinator: Coordinator
        self.journal: Journal

    async def start(self) -> None:
        self.journal = Journal(self.folder / "journal")
        index, ledger = open_index(self.config, self.journal, self.folder, self.attempt)
        segments: Any = self.store
        roster: Any = self.roster
        self.coordinator = Coordinator(
            self.config, self.journal, index, ledger, segments, roster, clock=lambda: self.clock
        )
        await self.coordinator.start()

    async def stop(self) -> None:
        self.coordinator.close()
        self.journal.close()

    async def bus(self, group: str, incarnation: int = 1) -> Bus:
        self.roster.groups[group] = {"incarnation": incarnation, "ranks": 1, "alive": True, "drains": False}
        await self.coordinator.member_started(group, incarnation, 1)
        wire: Any = Wire(self)
        segments: Any = self.store
        bus = Bus(Member(group, incarnation, 0, 1, self.attempt), wire, segments)
        await bus.open()
        return bus

    async def die(self, group: str, incarnation: int) -> None:
        self.roster.groups[group]["alive"] = False
        self.roster.dead.append([group, incarnation])
        await self.coordinator.member_dead(group, incarnation)


def payload(group: int, sample: int, nonce: int = 0, part: int = 0) -> np.ndarray:
    """The tokens of a row: their first number says whose they are, the others who put them."""
    return np.array([1000 * group + sample, part, *[nonce] * (LENGTH - 2)], np.int32)


def put(
    bus: Bus, grant: dict[str, Any], samples: list[int], nonce: int = 0, version: int = 0,
    parts: list[int] | None = None,
) -> None:  # fmt: skip
    """Samples of `version`; of several parts one has it, those before it are of the step's own, one behind it has none."""
    parts = parts or [1] * len(samples)
    rows = [(s, part, num) for part in range(max(parts)) for s, num in zip(samples, parts, strict=True) if part < num]
    columns = [
        Column("tokens", "int32", [payload(grant["group"], s, nonce, part) for s, part, _ in rows]),
        Column("loss_mask", "uint8", [np.ones(RESPONSE, np.uint8) for _ in rows]),
    ]
    oldest = [
        version if part == min(num, 3) - 1 else grant["step"] if part < 3 else NO_VERSION for _, part, num in rows
    ]
    info = [[LENGTH, RESPONSE, 1.0, each, each, 0, 1.0] for each in oldest]
    bus.put_samples(grant["ring"], grant["group"], grant["epoch"], samples, columns, info, parts)


OUTPUTS = {"actor_fwd": "log_probs", "advantages": "advantages"}


def put_scores(bus: Bus, stream: str, made: Round) -> None:
    scores = [np.full(RESPONSE, 1000 * row.group + row.sample + row.part / 8, np.float32) for row in made.rows]
    bus.put_columns(made, {OUTPUTS[stream]: scores})


async def ask(call: Any, turns: int = 4) -> Any:
    """The answer of a call, or None when it still waits after a few turns of the loop; it is cancelled then."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
        if task.done():
            return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None if task.cancelled() else task.result()
