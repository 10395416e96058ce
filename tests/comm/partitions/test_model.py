"""A partition against a plain model: whatever is done in whatever order, every task reads every row that it has not read yet.

A hypothesis state machine drives real partitions (coordinator, journal, rings of a few records, views of them) by the calls of
roles, beside dicts of what must be true. Bytes count: a row holds the first value that was put for each of its columns, and a
batch keeps its bytes until it is acknowledged, also when its rows were cleared. RONDO_MODEL_S=600 looks for new examples.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.stream import Stream
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import Task
from rondo.runtime.errors import CorruptData
from tests.comm.inprocess import Store, ask
from tests.comm.partitions.world import InProcess
from tests.strength import strength

BUDGET_S = float(os.environ.get("RONDO_MODEL_S", "0"))
WRITERS, READERS = ("rollout-0", "rollout-1"), ("actor_fwd-0", "actor-0")
TASKS = {"a": ("x",), "b": ("x", "y")}
KEYS = [f"k{i}" for i in range(8)]
LENGTH = 1500  # int32 of a value: a ring holds some ten of them
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


@dataclass
class Row:
    """What a row must hold: column -> the nonce of the put that came first. Another row of the same key is another object."""

    key: str
    values: dict[str, int]
    tags: dict[str, int]


@dataclass
class Held:
    batch: Batch
    rows: list[Row]
    expected: list[dict[str, int]]
    of_pass: int


class PartitionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="rondo-")
        self.store = Store()
        self.run_ = InProcess(Path(self.folder.name), self.store)
        self.lives = dict.fromkeys((*WRITERS, *READERS), 0)
        self.buses: dict[str, Any] = {}
        self.streams: dict[tuple[str, str], Stream] = {}
        self.nonce = 0
        # The model.
        self.rows: dict[str, Row] = {}
        self.read: dict[str, list[Row]] = {task: [] for task in TASKS}  # in this pass
        self.passes = dict.fromkeys(TASKS, 0)
        self.held: dict[tuple[str, str], list[Held]] = {}

    def teardown(self) -> None:
        self.held.clear()
        for bus in self.buses.values():
            bus.close()
        self.wait(self.run_.stop())
        self.loop.close()
        self.store.close()
        self.folder.cleanup()

    def wait(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def part(self, member: str) -> Any:
        return self.buses[member].partition("p", capacity_bytes=1 << 17, chunk_bytes=1 << 16)

    @property
    def table(self) -> Table:
        return self.run_.fold.tables[0]

    # ---- life ---------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.wait(self.run_.start())
        for member in self.lives:
            self.comes(member)
        self.wait(self.part(WRITERS[0]).opened())
        for task in TASKS:
            self.wait(self.streams[READERS[0], task].open())

    def comes(self, member: str) -> None:
        self.lives[member] += 1
        self.buses[member] = self.wait(self.run_.bus(member, self.lives[member]))
        for task, columns in TASKS.items() if member in READERS else ():
            self.streams[member, task] = self.part(member).stream(task, columns=columns, batch=3, partial=True)
            self.held[member, task] = []

    @rule(member=st.sampled_from((*WRITERS, *READERS)))
    def dies(self, member: str) -> None:
        """What it put stays; what it read and had not acknowledged comes again."""
        for task in TASKS:
            self.held.pop((member, task), None)
        self.buses.pop(member).close()
        self.wait(self.run_.die(member, self.lives[member]))
        self.comes(member)

    @rule()
    def coordinator_restarts(self) -> None:
        self.wait(self.part(WRITERS[0]).list(limit=1))  # every put is seen
        before = self.run_.fold.dump()
        assert Fold.load(orjson.loads(orjson.dumps(before))).dump() == before
        self.wait(self.run_.stop())
        self.wait(self.run_.start())
        assert self.run_.fold.dump() == before

    # ---- writing ------------------------------------------------------------------------------------------------------

    def values(self, count: int) -> list[np.ndarray]:
        return [np.full(LENGTH, self.nonce, np.int32) for _ in range(count)]

    @rule(
        writer=st.sampled_from(WRITERS), keys=some_keys, columns=st.sampled_from([("x",), ("y",), ("x", "y")]),
        tag=st.integers(0, 1),
    )  # fmt: skip
    def put(self, writer: str, keys: list[str], columns: tuple[str, ...], tag: int) -> None:
        """New keys make rows, known ones get the columns that they have not; without room it waits, and nothing is there."""
        self.nonce += 1

        async def putting() -> bool:
            given = {name: self.values(len(keys)) for name in columns}
            await self.part(writer).put(given, keys=keys, tags=[{"t": tag}] * len(keys))
            return True

        if self.wait(ask(putting(), 12)) is None:
            return
        for key in keys:
            row = self.rows.setdefault(key, Row(key, {}, {"t": tag}))
            for name in columns:
                row.values.setdefault(name, self.nonce)

    @rule(writer=st.sampled_from(WRITERS), keys=some_keys)
    def add(self, writer: str, keys: list[str]) -> None:
        """Further columns of rows that are there; the others are left out."""
        self.nonce += 1

        async def adding() -> bool:
            await self.part(writer).add(keys, {"y": self.values(len(keys))})
            return True

        if self.wait(ask(adding(), 12)) is not None:
            for key in keys:
                if key in self.rows:
                    self.rows[key].values.setdefault("y", self.nonce)

    @rule(keys=some_keys)
    def clear(self, keys: list[str]) -> None:
        assert self.wait(self.part(WRITERS[0]).clear(keys)) == sum(key in self.rows for key in keys)
        for key in keys:
            self.rows.pop(key, None)

    @rule(keys=some_keys, tag=st.integers(0, 1))
    def tag(self, keys: list[str], tag: int) -> None:
        if all(key in self.rows for key in keys):
            self.wait(self.part(WRITERS[0]).tag(keys, {"t": tag}))
            for key in keys:
                self.rows[key].tags["t"] = tag

    # ---- reading ------------------------------------------------------------------------------------------------------

    def ready(self, task: str) -> list[Row]:
        """Rows that are whole for a task and neither read in this pass nor held by anybody."""
        held = [row for (_, name), batches in self.held.items() if name == task for one in batches for row in one.rows]
        gone = [*held, *self.read[task]]
        return [
            row for row in self.rows.values()
            if all(name in row.values for name in TASKS[task]) and not any(row is other for other in gone)
        ]  # fmt: skip

    @rule(reader=st.sampled_from(READERS), task=st.sampled_from(sorted(TASKS)))
    def claim(self, reader: str, task: str) -> None:
        ready = self.ready(task)
        batch = self.wait(ask(self.streams[reader, task].next(), 12))
        if batch is None:
            assert not ready, f"rows {[row.key for row in ready]} are there for task {task}, and nobody gets them"
            return
        rows = [self.rows[key] for key in batch.keys]
        assert len(rows) == len(batch) <= 3
        assert all(any(row is one for one in ready) for row in rows), "a row comes once a pass, to one reader"
        expected = [{name: row.values[name] for name in TASKS[task]} for row in rows]
        self.held[reader, task].append(Held(batch, rows, expected, self.passes[task]))

    @rule(reader=st.sampled_from(READERS), task=st.sampled_from(sorted(TASKS)))
    def acknowledge(self, reader: str, task: str) -> None:
        batches = self.held[reader, task]
        if batches:
            one = batches.pop(0)
            one.batch.ack()
            self.wait(self.part(reader).flush())
            if one.of_pass == self.passes[task]:  # else this pass has not had it yet
                self.read[task] += one.rows

    @rule(task=st.sampled_from(sorted(TASKS)))
    def reset(self, task: str) -> None:
        self.passes[task] += 1
        assert self.wait(self.part(WRITERS[0]).reset(task, self.passes[task])) == self.passes[task]
        self.read[task] = []

    @rule(reader=st.sampled_from(READERS), task=st.sampled_from(sorted(TASKS)))
    def reset_while_reading(self, reader: str, task: str) -> None:
        """What is held when a pass begins was read for the one before: this pass has it again."""
        self.claim(reader, task)
        self.reset(task)
        self.acknowledge(reader, task)
        self.claim(reader, task)

    @rule(reader=st.sampled_from((*WRITERS, *READERS)), keys=some_keys, copy=st.booleans())
    def get(self, reader: str, keys: list[str], copy: bool) -> None:
        part = self.part(reader)
        if not all(key in self.rows for key in keys):
            with pytest.raises(KeyError):
                self.wait(part.get(keys))
            return
        batch = self.wait(part.get(keys, copy=copy))
        common = set.intersection(*[set(self.rows[key].values) for key in keys])
        assert set(batch.columns) == common and batch.keys == keys
        check_bytes(batch, [{name: self.rows[key].values[name] for name in common} for key in keys])

    @rule(reader=st.sampled_from((*WRITERS, *READERS)), tag=st.integers(0, 1))
    def list(self, reader: str, tag: int) -> None:
        found, _ = self.wait(self.part(reader).list(tags={"t": tag}))
        assert {row["key"] for row in found} == {key for key, row in self.rows.items() if row.tags == {"t": tag}}
        assert all(set(row["columns"]) == set(self.rows[row["key"]].values) for row in found)

    # ---- promises -----------------------------------------------------------------------------------------------------

    @invariant()
    def batches_keep_their_bytes(self) -> None:
        for batches in self.held.values():
            for one in batches:
                assert one.batch.valid()
                check_bytes(one.batch, one.expected)

    @rule()
    def counters_say_the_same(self) -> None:
        self.wait(self.part(WRITERS[0]).list(limit=1))
        stats = self.part(WRITERS[0]).stats()
        assert stats.num_rows == len(self.rows)
        for task, shown in stats.tasks.items():
            assert shown.num_ready == len(self.ready(task))
            assert shown.num_done == sum(any(row is one for one in self.rows.values()) for row in self.read[task])
        if not self.rows and not any(self.held.values()):
            assert stats.live_bytes == 0
        assert stats.live_bytes <= stats.ring_bytes <= (1 << 17) + (1 << 16)  # every writer has one chunk for certain


def check_bytes(batch: Batch, expected: list[dict[str, int]]) -> None:
    for name in expected[0] if expected else ():
        for array, values in zip(batch.arrays(name), expected, strict=True):
            assert array.size == LENGTH and (array == values[name]).all()


def check(max_examples: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        PartitionMachine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=40, derandomize=derandomize, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_a_partition_keeps_its_promises_whatever_is_done_in_whatever_order() -> None:
    check(strength(quick=12, full=30), derandomize=True)
    until = time.monotonic() + BUDGET_S
    while time.monotonic() < until:
        check(100, derandomize=False)


def _forgets_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "on_dead", lambda self, member: None)


def _dead_reader(machine: PartitionMachine) -> None:
    machine.put("rollout-0", ["k0", "k1"], ("x",), 0)
    machine.claim("actor-0", "a")
    machine.dies("actor-0")
    machine.claim("actor_fwd-0", "a")


def _frees_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "_hold", lambda self, claim: None)


def _cleared_while_read(machine: PartitionMachine) -> None:
    machine.put("rollout-0", ["k0", "k1"], ("x",), 0)
    machine.claim("actor-0", "a")
    machine.clear(["k0", "k1"])
    machine.batches_keep_their_bytes()


def _gives_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Task.move
    monkeypatch.setattr(
        Task, "move", lambda self, num, rows, old, new: move(self, num, rows, old, 1 if new == 2 else new)
    )  # claimed: ready


def _read_by_two(machine: PartitionMachine) -> None:
    machine.put("rollout-0", ["k0", "k1"], ("x",), 0)
    machine.claim("actor-0", "a")
    machine.claim("actor_fwd-0", "a")


@pytest.mark.parametrize(
    ("plant", "act"),
    [(_forgets_the_dead, _dead_reader), (_frees_what_is_read, _cleared_while_read), (_gives_twice, _read_by_two)],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    act: Callable[[PartitionMachine], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the acts that meet it; the same acts pass without the fault."""
    _run(act)
    plant(monkeypatch)
    with pytest.raises((AssertionError, CorruptData, KeyError)):
        _run(act)


def _run(act: Callable[[PartitionMachine], None]) -> None:
    machine = PartitionMachine()
    try:
        machine.begin()
        act(machine)
        machine.counters_say_the_same()
    finally:
        machine.teardown()
