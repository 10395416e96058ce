"""The actor between two steps, with a trainer and a bus that only write down what is asked of them; on several ranks:
`test_ranks.py`."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rondo.launch.config import load
from rondo.roles.actor import ActorRole, Taken
from rondo.roles.training.compute_turns import Turns
from rondo.roles.training.work import Work
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.records.timeline import span
from rondo.runtime.waits import PROCESS
from tests.schedules import later

ROOT = Path(__file__).parents[3]
CONFIG = load(ROOT / "examples" / "quickstart.py")


class Told:
    """A trainer whose every method writes its name down."""

    lent = None

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def beside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*given: Any, **_: Any) -> Any:
            self._log.append(name)
            if name == "sum_over_ranks":
                return [1.0 for _ in given[0]]
            return ({}, []) if name == "finish" else None

        method.__name__ = name
        return method


class OneRound:
    """A bus with one round a step, whose commits wait for `may_commit`."""

    def __init__(self, log: list[str]) -> None:
        self.may_commit = asyncio.Event()
        self.held_up = 0
        """How often it is still to say that it must wait for room itself; the commit is answered then."""
        self._log = log

    @property
    def held_up_at(self) -> float:
        if self.held_up:
            self.held_up -= 1
            if not self.held_up:
                self.may_commit.set()
            return PROCESS.clock()
        return -math.inf

    async def stream(self, *_: Any, step: int, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(rows=(), spans=[], last=True, closes=True, update=0, step=step, key=f"{step}")

    async def call(self, method: str, *_: Any, **__: Any) -> dict[str, Any]:
        if method == "commit":
            await self.may_commit.wait()
        self._log.append(method)
        return {"slot": 0}

    def check(self, made: Any) -> None: ...


class Actor(ActorRole):
    """With nothing to snapshot and nothing to publish into."""

    def __init__(self, log: list[str]) -> None:
        async def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            log.append(f"compute {getattr(function, '__name__', '')}")
            return function(*args, **kwargs)

        async def working(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return await compute(function, *args, **kwargs)

        async def report(*_: Any) -> None: ...

        ctx: Any = SimpleNamespace(
            world_size=1, rank=0, attempt=0, compute=compute, working=working, report=report,
            progress=lambda: None, span=lambda name, **_: span(name, "actor"),
        )  # fmt: skip
        super().__init__(ctx)
        self.bus, self.log = OneRound(log), log
        self._trainer: Any = Told(log)
        self._job: Any = SimpleNamespace(
            config=CONFIG,
            bus=self.bus,
            turns=Turns(),
            lent=None,
            publishes=True,
            takes_turns=False,
            rests=False,
            has_actor_fwd=True,
            device="cpu",
        )
        self._work = Work(1.0, 0.0, "cpu", None)
        self._snapshot, self._publishing, self._parity = None, None, None
        self._step_began = 0.0

    def _read(self, made: Any) -> tuple[list[Any], list[np.ndarray]]:
        return [], [np.zeros(1, np.int64)]

    async def _publish(self, version: int, taken: Taken) -> None:
        self.log.append(f"publish {version}")


async def until(log: list[str], name: str, times: int) -> None:
    async with asyncio.timeout(60):
        while log.count(name) < times:  # noqa: ASYNC110 - the log belongs to what is tested, and has no event
            await asyncio.sleep(0)


async def test_rounds_of_the_next_step_run_beside_a_commit_and_its_optimizer_waits_for_the_publication() -> None:
    log: list[str] = []
    actor = Actor(log)
    async with asyncio.TaskGroup() as tasks:
        actor._tasks = tasks
        await actor._train(0)
        second = tasks.create_task(actor._train(1))
        await until(log, "accumulate", 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert "commit" not in log
        assert log.count("finish") == 1
        actor.bus.may_commit.set()
        await second
    # What runs beside a round must not stand in line behind it.
    assert not {"compute checksum", "compute join_checksums"} & set(log)
    assert log.index("publish 1") < [at for at, name in enumerate(log) if name == "finish"][1]


async def test_an_engine_that_takes_turns_with_the_trainer_makes_room_before_a_round_is_trained() -> None:
    for takes_turns in (True, False):
        log: list[str] = []
        actor = Actor(log)
        actor.bus.may_commit.set()

        async def make_room(log: list[str] = log) -> None:
            log.append("make room")

        actor._job.takes_turns, actor._job.turns.make_room = takes_turns, make_room
        async with asyncio.TaskGroup() as actor._tasks:
            await actor._train(0)
        assert log.count("make room") == takes_turns
        assert not takes_turns or log.index("make room") < log.index("accumulate")


async def test_a_trainer_that_rests_takes_its_memory_after_the_engine_gave_its_own_and_gives_it_before_the_version_is_told() -> (
    None
):
    log: list[str] = []
    actor = Actor(log)
    actor.bus.may_commit.set()

    async def noted(name: str) -> None:
        log.append(name)

    async def copied(*_: Any) -> Any:
        log.append("copied")
        return 0, SimpleNamespace()

    actor._job.takes_turns = actor._job.rests = True
    actor._job.config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"hot_snapshot": False})})
    actor._job.turns.make_room = functools.partial(noted, "room")
    actor._copied = copied  # type: ignore[method-assign]
    actor._end_publish = lambda *_: noted("told")  # type: ignore[method-assign,assignment]
    actor._publish = functools.partial(ActorRole._publish, actor)  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as actor._tasks:
        await actor._train(0)
        await actor._settled()
    shown = [
        name for name in log if name in ("room", "wake", "accumulate", "finish", "commit", "copied", "rest", "told")
    ]
    assert shown == ["room", "wake", "room", "accumulate", "finish", "commit", "copied", "rest", "told"]


@pytest.mark.parametrize(("held_up", "ends"), [(3, False), (0, True)])
async def test_a_full_disk_of_the_coordinator_does_not_count_in_the_deadline_of_a_commit(
    monkeypatch: pytest.MonkeyPatch, held_up: int, ends: bool
) -> None:
    monkeypatch.setattr("rondo.roles.training.trainable.SETTLE_LIMIT_S", 50)
    actor = Actor([])
    actor.bus.held_up = held_up
    async with asyncio.TaskGroup() as actor._tasks:
        await actor._train(0)
        settled = asyncio.create_task(actor._settled())
        while not any(wait.name == "settle" for wait in PROCESS.pending()):  # noqa: ASYNC110 - of a wait
            await asyncio.sleep(0)
        for left in reversed(range(held_up or 1)):
            later(50)
            while actor.bus.held_up > left:  # noqa: ASYNC110 - a count
                await asyncio.sleep(0)
        if not ends:
            await settled
            return
        with pytest.raises(DeadlineExceeded, match="settle"):
            await settled
