"""When an autoscaler wants more or fewer replicas, in made-up time: samples in, decisions and their reasons out."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.launch.autoscale.decide import AutoscaleConfig, Decision, Sample, State, decide
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import explain
from tests.strength import strength

RULES = AutoscaleConfig(max_replicas=8)
PERIOD_S = RULES.period_s
STARVED = {"running": 64, "waiting": 40, "step_s": 10.0, "wait_s": 5.0}
"""The trainer waits half of its time, and both replicas are full."""
IDLE = {"running": 16, "waiting": 0, "step_s": 10.0, "wait_s": 0.0}
BALANCED = {"running": 60, "waiting": 0, "step_s": 10.0, "wait_s": 0.5}


class Fold:
    """An autoscaler, and the replicas that it looks at: a change is done when `scaled` says so."""

    def __init__(self, replicas: int = 2, rules: AutoscaleConfig = RULES) -> None:
        self.rules, self.state, self.now = rules, State(), 0.0
        self.replicas = self.serving = replicas
        self.last: Decision | None = None

    def see(self, seen: dict[str, Any], seconds: float = PERIOD_S, **more: Any) -> list[tuple[float, str, int]]:
        """Samples of that for so long, up to the first decision that is not to hold: (seconds until then, action, target)."""
        begun = self.now
        while self.now < begun + seconds:
            self.now += PERIOD_S
            fields = {"slots": 32 * self.serving, **seen, **more}
            sample = Sample(self.now, self.replicas, self.serving, **fields)
            self.state, self.last = decide(self.state, sample, self.rules)
            if self.last.action != "hold":
                return [(self.now - begun, self.last.action, self.last.target)]
        return []

    def reason(self) -> str:
        assert self.last is not None
        return self.last.reason

    def scaled(self, replicas: int, seconds: float = 60.0) -> None:
        """The change takes so long, and ends with that many."""
        self.replicas = max(self.replicas, replicas)
        assert self.see(STARVED, seconds, scaling=True) == []
        self.replicas = self.serving = replicas


def test_a_trainer_that_waits_for_full_engines_gets_as_many_replicas_as_would_have_kept_it_from_waiting() -> None:
    fold = Fold()
    assert fold.see(STARVED, 600) == [(100.0, "scale_out", 4)]  # a window after the first sample, then held
    assert fold.reason() == "the trainer waits 50% of its time for data, more than 10%, and engines are 100% in use"
    assert fold.last is not None and (fold.last.wait, fold.last.use, fold.last.queue) == (0.5, 1.0, 20.0)
    assert Fold().see(STARVED, 600, wait_s=1.5) == [(100.0, "scale_out", 3)]
    assert Fold().see(STARVED, 600, wait_s=9.0) == [(100.0, "scale_out", 6)]  # four more at once
    assert Fold(7).see(STARVED, 600, running=224) == [(100.0, "scale_out", 8)]


def test_a_full_cache_or_a_queue_is_a_full_engine_too_and_an_idle_one_is_no_reason_for_more() -> None:
    assert Fold().see(STARVED, 600, running=20, waiting=0, cache_use=0.9) == [(100.0, "scale_out", 4)]
    assert Fold().see(STARVED, 600, running=20, waiting=24) == [(100.0, "scale_out", 4)]
    fold = Fold()
    assert fold.see(STARVED, 3600, running=20, waiting=4) == []
    assert fold.reason() == (
        "the trainer waits 50% of its time for data, and not for engines, which are 31% in use: more would not help"
    )


def test_replicas_leave_one_by_one_where_the_others_have_room_and_never_below_the_least() -> None:
    fold = Fold(3)
    assert fold.see(IDLE, 3600, running=32) == [(190.0, "scale_in", 2)]
    assert fold.reason() == (
        "the trainer waits 0% of its time for data, less than 2%, and without one replica engines would be 50% in use"
    )
    fold.scaled(2)
    assert fold.see(IDLE, 3600, running=16) == [(310.0, "scale_in", 1)]  # the cooldown, from when the change was over
    fold.scaled(1)
    assert fold.see(IDLE, 3600, running=4) == []
    assert Fold(3).see(IDLE, 3600, running=60) == []  # the others would be 94 % in use
    assert Fold(3).see(IDLE, 3600, running=32, waiting=6) == []


def test_between_the_two_bounds_and_before_a_window_and_a_whole_step_nothing_is_decided() -> None:
    fold = Fold()
    assert fold.see(BALANCED, 3600) == []
    assert fold.reason() == "the trainer waits 5% of its time for data, and engines are 94% in use"
    fold = Fold()
    assert fold.see(STARVED, 3600, step_s=0.0, wait_s=0.0) == []
    assert fold.reason() == "too little was seen of this number of replicas"
    # Of the first step it is not known when it began. One that is longer than the window is read for as long as it is the last.
    assert fold.see(STARVED, PERIOD_S, step_s=600.0, wait_s=600.0) == []
    assert fold.see(STARVED, 300, step_s=0.0, wait_s=0.0) == []
    assert fold.see(STARVED, PERIOD_S, step_s=300.0, wait_s=100.0) == []
    assert fold.see(STARVED, 300, step_s=0.0, wait_s=0.0) == [(30.0, "scale_out", 3)]


def test_while_replicas_come_or_go_or_start_again_nothing_is_decided_and_what_was_seen_before_is_forgotten() -> None:
    fold = Fold()
    fold.see(STARVED, 600)
    fold.scaled(4, seconds=900)
    assert fold.reason() == "replicas come or go, 2 of 4 answer"
    assert fold.see(STARVED, 600, running=128) == [(100.0, "scale_out", 8)]  # a window, and held again
    fold = Fold(3)
    fold.serving = 2  # one of them died, and starts
    assert fold.see(STARVED, 3600) == []
    fold.serving = 3
    assert fold.see(STARVED, 600, running=96)[0][0] == 100.0


def test_a_sensor_that_says_the_opposite_every_other_time_moves_nothing_that_the_mean_does_not() -> None:
    fold = Fold()
    found = []
    for _ in range(360):
        found += fold.see(IDLE) + fold.see(STARVED)  # 25 % on average, and engines 63 % in use
    assert found == []
    slower = Fold(rules=AutoscaleConfig(max_replicas=8, window_s=10, hold_out_s=60))
    for _ in range(90):
        found += slower.see(STARVED, 40) + slower.see(IDLE, 40)
    assert found == []  # never for so long


def test_a_request_that_fails_makes_the_next_one_wait_twice_as_long() -> None:
    fold, waits = Fold(), []
    fold.see(STARVED, 600)
    for refused in (False, True, True, True):
        if not refused:
            fold.scaled(2)  # no device was free
        waits += [seconds for seconds, *_ in fold.see(STARVED, 3600)]
    assert waits == [130.0, 250.0, 490.0, 490.0]
    fold.scaled(4)
    assert fold.see(STARVED, 600, running=128)[0][0] == 100.0  # it came


def test_a_replica_that_was_wanted_back_soon_makes_the_next_one_stay_twice_as_long() -> None:
    fold, stays = Fold(), []
    for _ in range(3):
        stays += [seconds for seconds, *_ in fold.see(IDLE, 7200)]
        fold.scaled(1)
        assert fold.see(STARVED, 600, running=32)[0][1:] == ("scale_out", 2)
        fold.scaled(2)
    assert stays == [190.0, 610.0, 1210.0]


def test_a_change_by_hand_is_looked_at_anew() -> None:
    fold = Fold()
    fold.see(STARVED, 90)
    fold.replicas = fold.serving = 3
    assert fold.see(STARVED, 600, running=96) == [(100.0, "scale_out", 6)]


SEEN = st.fixed_dictionaries({
    "running": st.integers(0, 300), "waiting": st.integers(0, 300), "step_s": st.sampled_from([0.0, 5.0, 40.0]),
    "part": st.floats(0, 1), "cache_use": st.none() | st.floats(0, 1),
})  # fmt: skip


@settings(max_examples=strength(quick=30, full=300), deadline=None)
@given(seen=st.lists(SEEN, max_size=60), fails=st.booleans())
def test_whatever_is_seen_bounds_hold_changes_keep_their_distance_and_the_same_samples_decide_the_same(
    seen: list[dict[str, Any]], fails: bool
) -> None:
    rules = AutoscaleConfig(min_replicas=2, max_replicas=5, window_s=20, hold_out_s=0, hold_in_s=10, cooldown_in_s=40)
    samples, decisions, replicas, changing, now = list[Sample](), list[Decision](), 3, 0, 0.0
    state, target = State(), 3
    for each in seen * 3:
        now += rules.period_s
        changing -= changing > 0
        if not changing and not fails:
            replicas = target
        wait_s = each["part"] * each["step_s"]
        fields = {name: value for name, value in each.items() if name != "part"}
        sample = Sample(now, replicas, replicas, 32 * replicas, wait_s=wait_s, scaling=changing > 0, **fields)
        state, decision = decide(state, sample, rules)
        samples.append(sample)
        decisions.append(decision)
        assert rules.min_replicas <= decision.target <= rules.max_replicas
        if decision.action != "hold":
            assert not sample.scaling and decision.target != replicas
            target, changing = decision.target, 3
    changes = [decision.at for decision in decisions if decision.action != "hold"]
    assert all(after - before >= rules.window_s for before, after in itertools.pairwise(changes))
    state = State()
    for sample, decision in zip(samples, decisions, strict=True):
        state, again = decide(state, replace(sample), rules)
        assert asdict(again) == asdict(decision)


@pytest.mark.parametrize("wrong", [{"min_replicas": 3, "max_replicas": 2}, {"wait_in": 0.2}, {"period_s": 90.0}])
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as error:
        AutoscaleConfig(**{"max_replicas": 8, **wrong})
    told: ConfigError = explain(error.value, "x.py", "autoscale")
    assert " must be at most autoscale." in str(told)
