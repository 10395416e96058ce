"""A process killed at its n-th store to shared memory or its n-th journal write, for every n, or every third: all is there.

A scripted run (coordinator with journal, rings, every role, two that train), to its end or to a stop, in a child forked from this
warm process; a planted hook kills the child before or after the n-th store through `words.py`, or before, after or in the middle
of the n-th write to the journal. Another child opens the same memory and the same journal, checks what must be there, and takes
the run on.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import signal
import struct
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rondo.comm.bus.journal
from rondo.comm.bus.audit import audit
from rondo.comm.bus.bus import Bus
from rondo.comm.ring.ring import ring_bytes
from rondo.comm.ring.words import Words
from rondo.runtime.errors import Stopping
from tests.comm.driver import STREAMS
from tests.comm.inprocess import MEMBERS as SINGLE
from tests.comm.inprocess import InProcess, Store, ask, payload, put, put_scores
from tests.strength import LONG, strength

STEPS, P, N = 3, 2, 2
TRAIN = {"actor": ("log_probs", "advantages"), "critic": ("advantages",)}
"""Who trains, and what it reads of scores."""
MEMBERS = (*SINGLE, "critic-0")
RING_BYTES = ring_bytes(1 << 14)


class Log:
    """How many puts have returned, and how far a stop has come, in memory that survives the process."""

    PUTS, STOPS, LEFT = 0, 8, 16

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def count(self, what: int = PUTS) -> None:
        struct.pack_into("<Q", self._memory, what, self.of(what) + 1)

    def of(self, what: int) -> int:
        return int(struct.unpack_from("<Q", self._memory, what)[0])

    def __len__(self) -> int:
        return self.of(self.PUTS)


class Killer:
    """Kills this process at the `nth` act of a kind, `when` = before, after, or torn in the middle."""

    def __init__(self, nth: int, when: str) -> None:
        self._left, self._when = nth, when

    def act(self, perform: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        self._left -= 1
        if self._left or (self._when == "torn" and half is None):
            return perform()
        if self._when != "before":
            (half if self._when == "torn" and half is not None else perform)()
        os.kill(os.getpid(), signal.SIGKILL)


def plant(kind: str, nth: int, when: str) -> None:
    killer = Killer(nth, when)
    if kind == "store":
        store = Words.store
        Words.store = lambda self, index, value: killer.act(lambda: store(self, index, value))  # type: ignore[method-assign]
        return

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: bytes) -> Any:
            return killer.act(lambda: os.write(fd, data), lambda: os.write(fd, data[: len(data) // 2]))

    rondo.comm.bus.journal.os = Os()  # type: ignore[assignment]


async def work(run: InProcess, incarnations: dict[str, int], log: Log) -> None:
    """The run from wherever it is to its end."""
    names = ("rollout-0", "actor_fwd-0", "advantages-0", *(f"{role}-0" for role in TRAIN))
    rollout, fwd, advantages, actor, critic = [await run.bus(name, incarnations[name]) for name in names]
    if (await actor.call("committed"))["version"] is None:
        for role, bus in zip(TRAIN, (actor, critic), strict=True):
            await bus.call("commit", 0, 0, 7, [], role)
    indices = {"actor_fwd": 0, "advantages": 0}
    while not (state := await actor.call("committed"))["done"]:
        step = state["version"]
        await generate(rollout, step, log)
        for bus, stream in ((fwd, "actor_fwd"), (advantages, "advantages")):
            indices[stream] = await score(bus, stream, indices[stream])
        for role, bus in zip(TRAIN, (actor, critic), strict=True):
            await train(bus, role, step)


async def stop(run: InProcess, incarnations: dict[str, int], log: Log) -> None:
    """The run to a stop, in which the critic alone has trained the first step: log-probs for the actor do not come."""
    names = ("rollout-0", "advantages-0", *(f"{role}-0" for role in TRAIN))
    rollout, advantages, actor, critic = [await run.bus(name, incarnations[name]) for name in names]
    if not log.of(Log.STOPS):
        for role, bus in zip(TRAIN, (actor, critic), strict=True):
            if run.coordinator.index.version is None:
                await bus.call("commit", 0, 0, 7, [], role)
        await generate(rollout, 0, log)
        await score(advantages, "advantages", 0)
        if "critic" not in run.coordinator.index.prepared:
            await train(critic, "critic", 0)
        log.count(Log.STOPS)
        await run.coordinator.drain()
    if not log.of(Log.LEFT):
        assert await ask(actor.call("next_rounds", "actor", 0, 0, 0)) == {"end": True}
        log.count(Log.LEFT)
    for _ in range(6):  # acts behind that answer, enough to meet some with a critic that lives
        await rollout.call("proved", "rollout.0", 0)
    with pytest.raises(Stopping, match="left its step"):
        await ask(run.coordinator.await_version("critic-0", incarnations["critic-0"], 1, commits=True))
    assert run.coordinator.index.version == 0


async def generate(rollout: Bus, step: int, log: Log) -> None:
    await rollout.call("proved", "rollout.0", step)
    while leased := await ask(rollout.call("lease", 8, [])):
        for grant in leased["grants"]:
            for sample in sorted(set(range(N)) - {sample for sample, *_ in grant["have"]}):
                put(rollout, grant, [sample])
                log.count()


async def score(bus: Bus, stream: str, index: int) -> int:
    """From round `index` on; the next one."""
    await bus.join(stream, 1 << 20)
    while answer := await ask(bus.call("next_rounds", stream, 0, index)):
        for made in bus._rounds(stream, answer["rounds"]):
            put_scores(bus, stream, made)
            await bus.ack(made)
            index += 1
    return index


async def train(bus: Bus, role: str, step: int) -> None:
    spans: list[list[int]] = []
    async for made in bus.stream(role, tokens=1 << 20, step=step):
        for row in made.rows:
            np.testing.assert_array_equal(row.array("tokens"), payload(row.group, row.sample))
            assert {row.array(name)[0] for name in TRAIN[role]} == {1000 * row.group + row.sample}
        spans += made.spans
    await bus.call("commit", 0, step + 1, 7, spans, role)


Script = Callable[[InProcess, dict[str, int], Log], Coroutine[Any, Any, None]]


def make_run(folder: Path, store: Store) -> InProcess:
    streams = (
        *STREAMS[:2],
        *(replace(STREAMS[2], name=role, inputs=("tokens", *scores)) for role, scores in TRAIN.items()),
    )
    return InProcess(
        folder, store, ring_bytes=RING_BYTES, num_steps=STEPS, groups_per_step=P, max_staleness=0, streams=streams
    )


async def first_life(folder: Path, store: Store, log: Log, script: Script) -> None:
    run = make_run(folder, store)
    await run.start()
    await script(run, dict.fromkeys(MEMBERS, 1), log)


async def second_life(folder: Path, store: Store, log: Log, script: Script, *, producer_lives: bool) -> None:
    run = make_run(folder, store)
    run.roster.draining = log.of(Log.STOPS) > 0
    # What a living trainer has prepared stays so.
    lives = {"rollout-0", "actor-0" if script is work else "critic-0"} if producer_lives else set()
    life = {"incarnation": 1, "ranks": 1, "drains": False}
    run.roster.groups = {name: life | {"alive": name in lives} for name in MEMBERS}
    run.roster.dead = [[name, 1] for name in MEMBERS if name not in lives]
    await run.start()
    assert run.coordinator.index.imbalance() == ""
    num_put = audit(folder / "journal", N, P).num_put
    assert len(log) <= num_put <= len(log) + 1, f"{num_put} samples are there, {len(log)} puts had returned"
    await script(run, {name: 1 if name in lives else 2 for name in MEMBERS}, log)
    found = audit(folder / "journal", N, P)
    assert (found.num_lost, found.num_trained_twice, found.num_unexpected) == (0, 0, 0)
    assert run.coordinator.index.imbalance() == ""
    if script is work:
        assert found.num_trained == STEPS * P * N
        assert {ring["used"] for ring in run.coordinator.status()["rings"].values()} == {0}
    before = run.coordinator.index.dump()
    await run.stop()
    await run.start()
    assert run.coordinator.index.dump() == before


def in_child(act: Callable[[], Any]) -> tuple[int, str]:
    """(wait status, traceback) of a forked child. A child that hangs ends itself after two minutes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(120, exit=True, file=writing)
        try:
            asyncio.run(act())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - it has to leave by _exit, whatever happened: the rest of this process is the parent's
            os.write(writing, traceback.format_exc().encode()[-60000:])
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read().decode()
    return os.waitpid(pid, 0)[1], text


def crash_at(folder: Path, script: Script, kind: str, nth: int, when: str) -> bool:
    """One crash and the life after it; False when the run ended before its n-th act."""
    folder.mkdir()
    store, log = Store(), Log()
    for name in MEMBERS:
        store.segment(f"ring/{name}/0", RING_BYTES)  # made before the fork: the supervisor's, not the child's

    def first() -> Any:
        plant(kind, nth, when)
        return first_life(folder, store, log, script)

    try:
        status, text = in_child(first)
        assert status in (0, signal.SIGKILL), text
        if status == 0:
            return False
        alive = nth % 2 == 0
        status, text = in_child(lambda: second_life(folder, store, log, script, producer_lives=alive))
        assert status == 0, f"killed {when} {kind} {nth}, producer {'lives' if alive else 'died'}:\n{text}"
        return True
    finally:
        store.close()


@pytest.mark.parametrize(
    ("script", "kind", "when", "at_least"),
    [
        (work, "store", "after", 35),
        (work, "write", "after", 40),
        (work, "write", "torn", 40),
        (stop, "write", "after", 20),
        *([(work, "store", "before", 35), (work, "write", "before", 40)] if LONG else []),
        *([(stop, "write", "torn", 20), (stop, "store", "after", 10)] if LONG else []),
    ],
)
def test_a_crash_at_every_act_loses_nothing(
    tmp_path: Path, script: Script, kind: str, when: str, at_least: int
) -> None:
    """Before an act is after the one before it; but the producer that lives there dies here."""
    nth = 1
    while crash_at(tmp_path / str(nth), script, kind, nth, when):
        nth += strength(quick=3, full=1)  # odd and even ones in turn
    assert nth > at_least


def test_a_put_that_returned_and_is_gone_is_noticed(tmp_path: Path) -> None:
    store, log = Store(), Log()
    for name in MEMBERS:
        store.segment(f"ring/{name}/0", RING_BYTES)
    log.count()
    log.count()  # claims of puts that never were
    status, text = in_child(lambda: second_life(tmp_path, store, log, work, producer_lives=False))
    store.close()
    assert status != 0 and "puts had returned" in text
