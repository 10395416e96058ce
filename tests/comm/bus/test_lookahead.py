"""Rows that a filter or a curriculum leaves out: what is admitted instead, by what is journalled alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

import orjson
import pytest

from rondo.comm.bus.audit import audit
from rondo.comm.bus.bus import Bus
from rondo.comm.bus.curriculum import Curriculum, Rests
from rondo.comm.bus.lookahead import Lookahead
from tests.comm.bus.test_coordinator import train
from tests.comm.driver import Driver
from tests.comm.served import Served, prove, put_group, score, served

RESTS = Rests(steps=3, solved=1.0, hopeless=0.0, solved_from=1.0)


def judged(*rows: tuple[int, int, list[float | None]]) -> Curriculum:
    found = Curriculum(RESTS, max_staleness=1)
    for group, (step, row, rewards) in enumerate(rows):
        found.judge(step, group, "", row, rewards)
    return found


def test_solved_and_hopeless_rows_rest_from_when_everybody_knows_for_so_many_steps() -> None:
    found = judged((4, 1, [1, 2]), (4, 2, [0, 0.5]), (4, 3, [1, 0]), (4, 4, [None, None]))
    assert [found.why(6, "", row) for row in range(1, 5)] == ["solved", "hopeless", "", ""]
    assert found.why(6, "other", 1) == "" and found.num_resting(6) == {"solved": 1, "hopeless": 1}
    assert [step for step in range(12) if found.why(step, "", 1)] == [6, 7, 8]
    found.forget(9)
    assert found.judged() == []


def test_what_younger_steps_say_changes_nothing_of_a_step_and_a_newer_group_counts_behind_it() -> None:
    found = judged((4, 1, [1, 1]), (5, 2, [1, 1]), (5, 1, [1, 0]))
    found = Curriculum(RESTS, 1, orjson.loads(orjson.dumps(found.judged())))
    assert [found.why(6, "", row) for row in (1, 2)] == ["solved", ""]
    assert [found.why(7, "", row) for row in (1, 2)] == ["", "solved"]


def test_those_that_have_rested_longest_wake_first() -> None:
    found = judged((4, 1, [1, 1]), (4, 2, [0, 0]), (5, 3, [1, 1]))
    found.wake(7, "")
    assert [found.why(7, "", row) for row in (1, 2, 3)] == ["", "", "solved"]


class Replica:
    """Of data of two sources that share the positions; of "a" every third row is too short."""

    num_rows: ClassVar = {"a": 6, "b": 3}

    def __init__(self, bus: Bus, *, short: int = 3) -> None:
        self.bus, self.short = bus, short

    async def lease(self, most: int) -> list[dict[str, Any]]:
        while True:
            answer = await self.bus.call("lease", most, [])
            if "look" not in answer:
                return answer.get("grants", [])
            await self.tell(**answer["look"])

    async def tell(self, position: int, numbers: dict[str, int]) -> None:
        (source, number), *_ = sources = [["ab"[at % 2], at // 2] for at in range(position, position + 5)]
        number, size = numbers.get(source, number), self.num_rows[source]
        rows = [at % size for at in range(number, number + 2)]
        told = [[row, "too short" if source == "a" and row % self.short == 0 else ""] for row in rows]
        await self.bus.call("looked_at", position, sources, source, number, told, size)


async def run_steps(run: Served, num_steps: int, *, restarts: bool) -> list[list[Any]]:
    """[step, source, row] of every prompt group in admission order; half of those of "b" are solved, those of row 1 of "a" are
    filtered for equal rewards."""
    rollout, fwd, advantages, actor = [
        await run.bus(name) for name in ("rollout-0", "actor_fwd-0", "advantages-0", "actor-0")
    ]
    await actor.call("commit", 0, 0, 7, [])
    replica, found = Replica(rollout), list[list[Any]]()
    both = score(fwd, "actor_fwd", "log_probs", 99), score(advantages, "advantages", "advantages", 99)
    scoring = [asyncio.create_task(each) for each in both]
    for step in range(num_steps):
        await prove(rollout, step)
        num_put = 0
        while num_put < 3:
            for grant in await replica.lease(3):
                group = run.coordinator.index.groups[grant["group"]]
                assert group.row == grant["row"]
                found.append([grant["step"], group.source, grant["row"]])
                if restarts:
                    await run.restart()
                if (group.source, group.row) == ("a", 1):
                    await rollout.call("settle", group.id, grant["epoch"], "filtered", "equal rewards", [0.0, 0.0])
                else:
                    put_group(rollout, grant, [0, 1], 1.0 if group.source == "b" else 0.5)
                    num_put += 1
        if restarts:
            await run.restart()
        await train(run, actor, step)
    for task in scoring:
        task.cancel()
    await asyncio.gather(*scoring, return_exceptions=True)
    return found


async def test_a_coordinator_that_is_killed_between_any_two_acts_leaves_the_same_rows_out_and_counts_each_once() -> (
    None
):
    options: dict[str, Any] = {"max_staleness": 0, "num_steps": 7, "looks": True, "rests": RESTS}
    rows, counts = list[Any](), list[Any]()
    for restarts in (False, True):
        async with served(**options) as run:
            rows.append(await run_steps(run, 7, restarts=restarts))
            index = run.coordinator.index
            counts.append([index.left_out, index.numbers, index.counts, index.curriculum.judged()])  # type: ignore[union-attr]
            assert index.imbalance() == "" and audit(run.folder / "journal", 2, 3).num_lost == 0
    assert rows[0] == rows[1] and counts[0] == counts[1]
    left_out, _, accounts, _ = counts[0]
    # A mixture keeps its weights, whatever is left out of its sources; what is left out is never admitted.
    assert Counter(source for _, source, _ in rows[0]).keys() == {"a", "b"}
    assert all(abs(2 * [row[1] for row in rows[0][:end]].count("a") - end) <= 1 for end in range(len(rows[0])))
    assert accounts["admitted"] == len(rows[0]) == accounts["trained"] + accounts["filtered"]
    assert left_out.keys() == {"a: too short", "a: rests, hopeless", "b: rests, solved"}
    assert {row for _, source, row in rows[0] if source == "a"} == {1, 2, 4, 5}
    # Nobody starves: all of "b" rests, and then those come back that have rested longest.
    of_b = [row for _, source, row in rows[0] if source == "b"]
    assert of_b[:6] == [0, 1, 2] * 2 and set(of_b[6:]) == {0, 1, 2}


async def test_data_of_which_a_filter_leaves_nothing_end_the_run_with_the_reason() -> None:
    async with served(max_staleness=0, looks=True) as run:
        rollout, actor = await run.bus("rollout-0"), await run.bus("actor-0")
        await actor.call("commit", 0, 0, 7, [])
        await prove(rollout)
        replica = Replica(rollout, short=1)
        for _ in range(8):
            answer = await rollout.call("lease", 3, [])
            if "look" not in answer:
                break
            await replica.tell(**answer["look"])
        assert run.coordinator.index.starving() == (
            "data.filter must leave rows of a, got none of 6. Most often: a: too short. Correct data.filter, or take other data"
        )


@pytest.mark.parametrize(("used", "starving"), [((), True), ((1, 4), True), ((0, 2, 3), False), ((0, 1, 2, 5), False)])
def test_data_end_with_whole_steps_of_what_is_left_and_with_an_error_where_that_is_not_one(
    used: tuple[int, ...], starving: bool
) -> None:
    """One pass over six rows."""
    bus, lookahead = Driver(num_positions=6, looks=True, max_staleness=0), Lookahead()
    rows = [[row, "" if row in used else "too short"] for row in range(6)]
    lookahead.tell(0, [["", position] for position in range(6)], "", 0, rows, 6)
    while not (bus.index.done or bus.index.starving()):
        for planned in bus.index.plan_admissions(bus.index.step):
            for event in lookahead.plan(bus.index, planned):
                bus.emit(**event)
            if lookahead.wanted:
                break
        for group in list(bus.index.waiting(bus.index.step)):
            bus.fill(group.id)
        bus.score()
        while bus.train_rounds(bus.index.step):
            pass
        if len(bus.index.membership(bus.index.step)) == 3:
            bus.commit(bus.index.step + 1)
    assert (bool(bus.index.starving()), bus.index.version) == (starving, 0 if starving else 1)
    assert bus.index.imbalance() == "" and bus.index.left_out["too short"] == 6 - len(used) - (used == (0, 2, 3)) * 2
