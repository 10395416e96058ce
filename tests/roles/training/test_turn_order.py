"""Several ranks that train, score and install versions on one thread each: whoever is ready when, all do it in one order."""

from __future__ import annotations

import asyncio
import datetime
import random
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.roles.forward import ActorForwardRole, Scored
from rondo.roles.training.compute_turns import Turns
from rondo.roles.training.group_versions import follow_together
from rondo.roles.training.turn_order import TurnsFollowed, TurnsTold
from rondo.runtime.errors import Stopping
from rondo.runtime.records.timeline import span
from tests.comm.memory import MemorySegment

PATIENCE_S = 60
NUM_SLOTS = 2


class Store:
    """torch's store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed, self._closed = threading.Condition(), False

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or all(key in self.values for key in keys))
            if self._closed:
                raise ConnectionError("the store is gone")

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, number: int, /) -> int:
        with self._changed:
            found = int(self.values.get(key, "0")) + number
            self.values[key] = str(found)
            return found

    def delete_key(self, key: str, /) -> bool:
        return self.values.pop(key, None) is not None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@asynccontextmanager
async def ranks(num: int) -> AsyncIterator[tuple[Store, list[Turns]]]:
    store = Store()
    try:
        others = [Turns(TurnsFollowed(store, num - 1)) for _ in range(1, num)]
        async with asyncio.timeout(PATIENCE_S):
            yield store, [Turns(TurnsTold(store)), *others]
    finally:
        store.close()


class Thread:
    """What one rank computes, each piece of which all ranks must join."""

    def __init__(self, chance: random.Random) -> None:
        self.log: list[str] = []
        self._chance, self._free = chance, asyncio.Lock()

    async def moment(self) -> None:
        for _ in range(self._chance.randrange(12)):
            await asyncio.sleep(0)

    async def compute(self, name: str) -> None:
        async with self._free:
            self.log.append(name)
            await self.moment()


async def train(turns: Turns, thread: Thread) -> None:
    async with turns.training():
        await thread.compute("load")
    for step in range(3):
        async with turns.training():
            for number in range(3):
                async with turns.waiting():
                    await thread.moment()
                await thread.compute(f"round {step}.{number}")
                await thread.moment()
            async with turns.waiting():
                await thread.moment()
            await thread.compute(f"optimizer {step}")
        await thread.moment()


async def score(turns: Turns, thread: Thread, role: str, leads: bool) -> None:
    for number in range(8):
        await thread.moment()
        async with turns.scoring(role, f"as rank 0 says {number}" if leads else None) as said:
            assert said == f"as rank 0 says {number}"
            await thread.compute(f"{role} {number}")


@pytest.mark.parametrize("seed", range(20))
async def test_ranks_that_are_ready_at_different_moments_compute_in_one_order(seed: int) -> None:
    threads = [Thread(random.Random(f"{seed} {rank}")) for rank in range(3)]
    async with ranks(3) as (_, turns), asyncio.TaskGroup() as tasks:
        for rank, thread in enumerate(threads):
            tasks.create_task(train(turns[rank], thread))
            for role in ("reference", "actor_fwd"):
                tasks.create_task(score(turns[rank], thread, role, rank == 0))
    assert len(threads[0].log) == 1 + 3 * 4 + 2 * 8
    assert threads[1].log == threads[0].log and threads[2].log == threads[0].log


async def test_the_store_keeps_no_turn_that_all_have_read_and_its_death_is_an_error_of_whoever_waits() -> None:
    async with ranks(3) as (store, turns):
        for _ in range(200):
            async with turns[0].scoring("reference"):
                pass  # far ahead of the others
        for rank in (1, 2):
            for _ in range(200):
                async with turns[rank].scoring("reference"):
                    pass
        await until(lambda: not store.values)
        store.close()
        with pytest.raises(ConnectionError):
            async with turns[1].scoring("reference"):
                pass


# ---- versions -----------------------------------------------------------------------------------------------------------


class Published:
    """The coordinator's side of published versions, and the slab they lie in."""

    def __init__(self) -> None:
        self.segment = MemorySegment(slab_bytes(64, 1, NUM_SLOTS))
        self._slab = WeightSlab(self.segment, NUM_SLOTS)
        self._held: dict[str, int] | None = None
        self._news = asyncio.Event()
        self.ended: str = ""
        self.calls: list[tuple[str, int]] = []

    def publish(self, version: int) -> None:
        writer = self._slab.write(version % NUM_SLOTS, attempt=0, version=version)
        writer.add("weight", torch.full((4,), float(version)))
        self._held = {"slot": version % NUM_SLOTS, "version": version, "attempt": 0, "checksum": writer.finish()}
        self._news.set()

    def end(self, how: str) -> None:
        self.ended = how
        self._news.set()

    async def call(self, method: str, *arguments: Any, **_: Any) -> Any:
        if method == "proved":
            self.calls.append((method, arguments[1]))
            return None
        while True:
            self._news.clear()
            if self._held is not None and self._held["version"] > arguments[1]:
                self.calls.append(("held", self._held["version"]))
                return self._held
            if self.ended == "stopping":
                raise Stopping("weights must be published, got none")
            if self.ended:
                return {"end": True}
            await self._news.wait()


class Rank:
    def __init__(self, rank: int, turns: Turns, published: Published, together: asyncio.Barrier) -> None:
        segments = SimpleNamespace(segment=lambda *_: published.segment)
        self.ctx: Any = SimpleNamespace(
            rank=rank, world_size=2, segments=segments, span=lambda name, **_: span(name, "actor_fwd")
        )
        self.job: Any = SimpleNamespace(bus=published, turns=turns, config=SimpleNamespace(num_weight_slots=NUM_SLOTS))
        self.installed: list[int] = []
        self.every = 1
        self._together = together

    async def install(self, version: int, tensors: Mapping[str, Any]) -> None:
        await self._together.wait()
        assert tensors["weight"].tolist() == [float(version)] * 4
        self.installed.append(version)
        await self._together.wait()

    async def run(self, leave: asyncio.Event) -> None:
        async with follow_together(self.ctx, self.job, "actor_fwd", self.install, self.every) as first:
            await first.wait()
            await leave.wait()


@asynccontextmanager
async def two_that_follow() -> AsyncIterator[
    tuple[Published, list[Rank], list[asyncio.Task[None]], list[asyncio.Event]]
]:
    async with ranks(2) as (_, turns):
        published, together = Published(), asyncio.Barrier(2)
        made = [Rank(rank, turns[rank], published, together) for rank in range(2)]
        leave = [asyncio.Event(), asyncio.Event()]
        tasks = [asyncio.create_task(rank.run(event)) for rank, event in zip(made, leave, strict=True)]
        yield published, made, tasks, leave


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110 - a thread is behind it
        await asyncio.sleep(0.001)


async def test_all_ranks_install_the_versions_of_the_first_and_its_slot_is_held_until_they_have() -> None:
    async with two_that_follow() as (published, made, tasks, leave):
        published.publish(3)
        await until(lambda: ("proved", 3) in published.calls)
        assert made[0].installed == made[1].installed == [3]
        # A version comes while the second rank computes something else: the first one waits for it, and a third replaces none.
        async with made[0].job.turns.scoring("actor_fwd"), made[1].job.turns.scoring("actor_fwd"):
            published.publish(4)
            await until(lambda: ("held", 4) in published.calls)
            await asyncio.sleep(0)
            assert ("proved", 4) not in published.calls
        await until(lambda: ("proved", 4) in published.calls)
        assert made[0].installed == made[1].installed == [3, 4]
        for event in leave:
            event.set()
        await asyncio.gather(*tasks)


async def test_of_so_many_versions_one_is_installed_the_first_that_comes_from_each_multiple_on() -> None:
    async with two_that_follow() as (published, made, tasks, leave):
        made[0].every = made[1].every = 3
        published.publish(1)
        await until(lambda: ("proved", 1) in published.calls)
        for version in (2, 5):  # 3 and 4 are never seen: the reader was busy
            published.publish(version)
            await asyncio.sleep(0)
        await until(lambda: len(published.calls) == 4)
        published.publish(6)
        await until(lambda: ("proved", 6) in published.calls)
        assert [version for what, version in published.calls if what == "proved"] == [1, 5, 6]
        assert made[0].installed == made[1].installed == [1, 5, 6]
        for event in leave:
            event.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("first", [0, 1])
async def test_a_rank_that_leaves_while_a_version_comes_leaves_no_other_behind_in_its_turn(first: int) -> None:
    async with two_that_follow() as (published, made, tasks, leave):
        published.publish(0)
        await until(lambda: ("proved", 0) in published.calls)
        async with made[0].job.turns.scoring("actor_fwd"), made[1].job.turns.scoring("actor_fwd"):
            published.publish(1)
            await until(lambda: ("held", 1) in published.calls)
            leave[first].set()
            await asyncio.sleep(0)
        leave[1 - first].set()
        await asyncio.gather(*tasks)
        assert made[0].installed == made[1].installed
        async with made[0].job.turns.training(), made[1].job.turns.training():
            pass  # nothing stands in the order that nobody takes


async def test_a_run_that_is_stopped_before_its_first_version_ends_all_ranks_alike() -> None:
    async with two_that_follow() as (published, _, tasks, _):
        published.end("stopping")
        for task in tasks:
            with pytest.raises(ExceptionGroup) as raised:
                await task
            assert raised.group_contains(Stopping)


class Scorer:
    """Of one rank; what the ranks ask for is compared as their collectives do it."""

    def __init__(self, asked: list[int], together: asyncio.Barrier) -> None:
        self.version, self.calls = -1, list[int]()
        self._asked, self._together = asked, together

    def score(self, rows: Any, *, needs: int, stops: bool) -> Scored:
        self.calls.append(self.version)
        return Scored(self.version, None if needs > self.version else [])

    async def working(self, name: str, score: Any, rows: Any, *, needs: int, stops: bool) -> Scored:
        self._asked.append(needs)
        await self._together.wait()
        most = max(self._asked)
        await self._together.wait()
        self._asked.clear()
        return score(rows, needs=most, stops=stops)  # type: ignore[no-any-return]


async def test_no_row_is_scored_under_older_weights_than_it_was_sampled_under_on_any_rank() -> None:
    async with two_that_follow() as (published, made, tasks, leave):
        scorers = [Scorer(asked, barrier) for asked, barrier in [([], asyncio.Barrier(2))] * 2]
        roles = []
        for rank, scorer in zip(made, scorers, strict=True):
            rank.ctx.working, rank.ctx.stopping = scorer.working, asyncio.Event()
            roles.append(ActorForwardRole(rank.ctx))

            async def install(
                version: int, tensors: Any, rank: Rank = rank, scorer: Scorer = scorer, role: Any = roles[-1]
            ) -> None:
                await Rank.install(rank, version, tensors)
                scorer.version = version
                role._installed.set()

            rank.install = install  # type: ignore[method-assign]
        published.publish(4)
        await until(lambda: ("proved", 4) in published.calls)
        # One rank has a row that was sampled under 5, which it has not heard of yet; the other has none.
        sampled: Any = SimpleNamespace(group=0, array=lambda _: np.array([-1, 3, 5], np.int32))
        rounds: list[Any] = [SimpleNamespace(step=5, rows=rows) for rows in ([sampled], [])]
        scoring = [
            asyncio.create_task(role._scored(rank.job, scorer, each, []))  # type: ignore[arg-type]
            for role, rank, scorer, each in zip(roles, made, scorers, rounds, strict=True)
        ]
        await until(lambda: all(scorer.calls == [4] for scorer in scorers))
        published.publish(5)
        assert [found.version for found in await asyncio.gather(*scoring)] == [5, 5]
        assert all(scorer.calls == [4, 5] for scorer in scorers)
        for event in leave:
            event.set()
        await asyncio.gather(*tasks)
