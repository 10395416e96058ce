"""Rounds that are asked for before they are needed: held at the coordinator until full, and at once when a rank is idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rondo.comm.bus.ahead import Ahead
from rondo.comm.bus.bus import Bus
from tests.comm.bus.test_updates import groups_of, ready
from tests.comm.driver import Driver
from tests.comm.served import Served, prove, put_group, score, served

GROUP = 20
"""Tokens of a prompt group: two rows of ten."""


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is looked at belongs to the coordinator, and has no event
            await asyncio.sleep(0.001)


@asynccontextmanager
async def everyone(run: Served) -> AsyncIterator[tuple[Bus, Bus]]:
    """Rollout and actor, after the first commit; what rollout puts gets its other columns at once."""
    rollout, fwd, advantages, actor = [
        await run.bus(name) for name in ("rollout-0", "actor_fwd-0", "advantages-0", "actor-0")
    ]
    await actor.call("commit", 0, 0, 7, [])
    await prove(rollout)
    async with asyncio.TaskGroup() as tasks:
        scoring = [
            tasks.create_task(score(fwd, "actor_fwd", "log_probs", 99)),
            tasks.create_task(score(advantages, "advantages", "advantages", 99)),
        ]
        yield rollout, actor
        for task in scoring:
            task.cancel()


def waiters(run: Served) -> int:
    """Requests that wait at the coordinator, without those of the two scoring streams."""
    return int(run.coordinator.status()["waiters"]) - 2


async def scored(run: Served, groups: list[int]) -> None:
    lane = run.coordinator.index.rounds.lanes["actor"]
    await until(lambda: all(group in lane.taken for group in groups))


def planned(run: Served, step: int, index: int) -> bool:
    return bool(run.coordinator.index.rounds.find("actor", f"step{step}", index))


def test_a_round_is_planned_early_only_when_nothing_could_be_added_to_it() -> None:
    bus = Driver(groups_per_step=4)
    bus.join(tokens=2 * GROUP)
    a, b, c, d = bus.admit(0)

    def early() -> list[list[int]]:
        events = bus.index.plan_rounds("actor", "actor-0", 1, 0, full=True)
        return [groups_of([event]) for event in events]

    ready(bus, [a])
    assert early() == []  # b fits beside it
    ready(bus, [c])
    assert early() == []  # together they fill it, but whatever comes next may cost less than c
    ready(bus, [b])
    assert early() == [[a, b]]
    assert bus.index.plan_rounds("actor", "actor-0", 1, 0) == bus.index.plan_rounds("actor", "actor-0", 1, 0, full=True)
    bus.train_rounds(0)
    assert early() == []
    ready(bus, [d])
    assert early() == [[c, d]]  # all that is left of the step


async def test_the_next_round_is_planned_and_held_while_one_is_worked_on_and_so_is_the_next_steps_first() -> None:
    async with served(max_staleness=1, num_steps=2) as run, everyone(run) as (rollout, actor):
        for grant in (await rollout.call("lease", 8, []))["grants"]:
            put_group(rollout, grant, [0, 1])
        spans = []
        async for made in actor.stream("actor", tokens=GROUP, step=0, then=1):
            following = (1, 0) if made.last else (0, made.index + 1)
            await until(lambda following=following: planned(run, *following))
            for row in made.rows:
                assert row.array("tokens")[0] == 100 * row.group + row.sample
            for column in ("tokens", "advantages"):
                values, lengths = made.rows.packed(column)
                apart = [row.array(column) for row in made.rows]
                assert list(lengths) == [len(array) for array in apart]
                np.testing.assert_array_equal(values, np.concatenate(apart))
            actor.check(made)
            spans += made.spans
        assert [index for index in range(4) if planned(run, 0, index)] == [0, 1, 2]
        await actor.call("commit", 0, 1, 7, spans)
        async with aclosing(actor.stream("actor", tokens=GROUP, step=1)) as rounds:
            first = await anext(rounds)
            assert (first.step, first.index, first.rows[0].group) == (1, 0, 3)


async def test_a_rank_that_is_idle_gets_what_is_ready_and_the_one_that_asked_early_the_same() -> None:
    async with served(max_staleness=0) as run, everyone(run) as (rollout, actor):
        first, second, third = (await rollout.call("lease", 8, []))["grants"]
        put_group(rollout, first, [0, 1])
        async with aclosing(actor.stream("actor", tokens=2 * GROUP, step=0)) as rounds:
            assert [row.group for row in (await anext(rounds)).rows] == [first["group"]] * 2
            early = asyncio.create_task(actor.call("next_rounds", "actor", 0, 1, 0, True))
            await until(lambda: waiters(run) == 2)
            put_group(rollout, second, [0, 1])
            await scored(run, [second["group"]])
            assert not planned(run, 0, 1)  # the third group fits beside it
            made = await anext(rounds)
            assert [row.group for row in made.rows] == [second["group"]] * 2
            assert (await early)["rounds"][0]["spans"] == made.spans
            put_group(rollout, third, [0, 1])
            assert (await anext(rounds)).last


async def test_whoever_leaves_in_the_middle_of_a_step_leaves_no_request_behind() -> None:
    async with served(max_staleness=0) as run, everyone(run) as (rollout, actor):
        put_group(rollout, (await rollout.call("lease", 8, []))["grants"][0], [0, 1])
        async with aclosing(actor.stream("actor", tokens=2 * GROUP, step=0)) as rounds:
            await anext(rounds)
            await until(lambda: waiters(run) == 1)
        await until(lambda: waiters(run) == 0)


async def test_an_end_that_is_told_early_is_the_end_of_the_rounds() -> None:
    async with served(max_staleness=0) as run, everyone(run) as (rollout, actor):
        put_group(rollout, (await rollout.call("lease", 8, []))["grants"][0], [0, 1])
        async with aclosing(actor.stream("actor", tokens=2 * GROUP, step=0)) as rounds:
            await anext(rounds)
            await until(lambda: waiters(run) == 1)
            await run.coordinator.drain()
            assert await anext(rounds, None) is None


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_an_error_of_an_early_request_is_raised_to_whoever_takes_its_answer() -> None:
    async def request(step: int, index: int, early: bool) -> int:
        assert (step, index, early) == (0, 1, True)
        raise ConnectionError("gone")

    ahead = Ahead(request)
    ahead.ask(0, 1)
    await asyncio.sleep(0)
    with pytest.raises(ConnectionError, match="gone"):
        await ahead.take(0, 1)


async def test_what_is_needed_while_it_is_waited_for_early_is_asked_for_anew_and_the_early_request_ends() -> None:
    ended = asyncio.Event()

    async def request(step: int, index: int, early: bool) -> int:
        try:
            if early:
                await for_ever()
            return 10 * step + index
        finally:
            if early:
                ended.set()

    ahead = Ahead(request)
    ahead.ask(0, 1)
    await asyncio.sleep(0)
    assert not ended.is_set()
    assert await ahead.take(0, 1) == 1
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_round_that_has_come_is_not_asked_for_again_while_it_is_prepared() -> None:
    asked: list[bool] = []
    preparing, go_on = asyncio.Event(), asyncio.Event()

    async def request(step: int, index: int, early: bool) -> int:
        asked.append(early)
        return 10 * step + index

    async def prepare(made: int) -> None:
        assert made == 1
        preparing.set()
        await go_on.wait()

    ahead = Ahead(request)
    ahead.ask(0, 1, prepare)
    await preparing.wait()
    taken = asyncio.create_task(ahead.take(0, 1))
    await asyncio.sleep(0)
    assert not taken.done()
    go_on.set()
    assert await taken == 1 and asked == [True]


async def test_what_is_needed_before_the_loop_has_turned_is_asked_for_once_and_not_early() -> None:
    asked: list[tuple[int, int, bool]] = []

    async def request(step: int, index: int, early: bool) -> int:
        asked.append((step, index, early))
        return 10 * step + index

    ahead = Ahead(request)
    ahead.ask(0, 1)
    assert await ahead.take(0, 1) == 1
    await asyncio.sleep(0)
    assert asked == [(0, 1, False)]


async def test_an_early_request_for_another_place_is_forgotten() -> None:
    ended: list[tuple[int, int, bool]] = []

    async def request(step: int, index: int, early: bool) -> int:
        try:
            if early:
                await for_ever()
            return 10 * step + index
        finally:
            ended.append((step, index, early))

    ahead = Ahead(request)
    ahead.ask(0, 1)
    await asyncio.sleep(0)
    assert await ahead.take(1, 0) == 10
    await until(lambda: len(ended) == 2)
    assert sorted(ended) == [(0, 1, True), (1, 0, False)]
