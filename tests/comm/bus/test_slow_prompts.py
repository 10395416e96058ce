"""Slow prompts train exactly as often as quick ones: a step waits for its own, and never fills up with what ends first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rondo.comm.bus.index import Index
from tests.comm.driver import Driver
from tests.comm.inprocess import InProcess, Store, put

NUM_ROWS, NUM_PASSES = 12, 4
PER_STEP = 3


def decode_steps(row: int) -> int:
    """How long a prompt's samples take: every fourth is a straggler, the others are quick."""
    return 40 if row % 4 == 0 else 1 + row % 3


def trained_by_row(*, max_staleness: int, num_slots: int, spare_groups: int = 0) -> Counter[int]:
    """How often each row of the data set was trained, in a run over all passes whose replica has so many slots for groups and
    hands in whatever ends first."""
    num_positions = NUM_ROWS * NUM_PASSES
    num_steps = num_positions // PER_STEP
    run = Driver(
        num_steps=num_steps, max_staleness=max_staleness, groups_per_step=PER_STEP, num_positions=num_positions,
        spare_groups=spare_groups,
    )  # fmt: skip
    left: dict[int, int] = {}  # group in a slot -> decode steps until its samples end
    trained: Counter[int] = Counter()
    positions: dict[int, int] = {}
    for _ in range(100_000):
        if run.index.done:
            return trained
        for step in run.index.open_steps(run.index.step):
            for event in run.index.plan_admissions(step):
                positions[event["group"]] = event["position"]
                run.emit(**event)
            for group in [group.id for group in run.index.waiting(step)][: num_slots - len(left)]:
                run.grant(group)
                left[group] = decode_steps(positions[group] % NUM_ROWS)
        left = {group: steps - 1 for group, steps in left.items()}
        for group in [group for group, steps in left.items() if steps == 0]:
            del left[group]
            run.put(group, [0, 1])
        run.score()
        now = run.index.step
        if len(run.index.membership(now)) == PER_STEP:
            while run.train_rounds(now):
                pass
            trained.update(positions[group] % NUM_ROWS for group in {group for group, *_ in run.commit(now + 1)})
    raise AssertionError("the run must end")


@pytest.mark.parametrize("max_staleness", [0, 1, 4, 8])
@pytest.mark.parametrize("num_slots", [2, 5, 64])
def test_slow_prompts_train_exactly_as_often_as_quick_ones(max_staleness: int, num_slots: int) -> None:
    trained = trained_by_row(max_staleness=max_staleness, num_slots=num_slots)
    assert trained == dict.fromkeys(range(NUM_ROWS), NUM_PASSES)


def test_a_step_that_took_what_ends_first_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: spare groups, and a membership by readiness in the place of admission order."""

    def first_come(index: Index, step: int) -> list[int]:
        return [g for g in index.survivors(step) if index.groups[g].state == "ready"][: index.rules.groups_per_step]

    monkeypatch.setattr(Index, "membership", first_come)
    trained = trained_by_row(max_staleness=1, num_slots=64, spare_groups=2)
    slow = [trained[row] for row in range(NUM_ROWS) if decode_steps(row) == 40]
    assert sum(slow) < NUM_PASSES * len(slow)


async def test_the_wait_for_a_steps_longest_trajectories_begins_when_half_of_it_and_its_version_are_there(
    tmp_path: Path,
) -> None:
    store = Store()
    run = InProcess(tmp_path, store, ring_bytes=1 << 16, groups_per_step=4, samples_per_group=2, max_staleness=1)
    try:
        await run.start()
        actor, rollout = await run.bus("actor-0"), await run.bus("rollout-0")
        await actor.call("commit", 0, 0, 7, [])
        await rollout.call("proved", "rollout.0", 0)
        grants = (await rollout.call("lease", 8, []))["grants"]
        for step, (times, committed_at, expected) in enumerate((((1, 2, 3, 11), 0, 9.0), ((12, 12, 13, 20), 15, 5.0))):
            run.clock = float(committed_at)
            if step:
                spans = [[grant["group"], 0, 0, 2] for grant in grants[:4]]
                await actor.call("commit", 0, 1, 7, spans)
            for grant, at in zip(grants[4 * step :][:4], times, strict=True):
                run.clock = float(at)
                put(rollout, grant, [0, 1])
                await rollout.call("renew", [])
            run.clock = 100.0
            assert (await actor.call("step_on_bus", step))["longest_wait_s"] == expected
        await run.stop()
        await run.start()
        assert (await actor.call("step_on_bus", 1))["longest_wait_s"] == 0.0
        await run.stop()
    finally:
        store.close()
