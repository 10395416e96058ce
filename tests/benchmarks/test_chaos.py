"""The benchmark of faults turns red where a promise is broken, and understands what a run says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos import fallen, seconds_limit
from benchmarks.chaos_run import Line, parsed
from benchmarks.soak import Looks, fit, interval

GOOD: dict[str, Any] = {
    "detect_s": 0.1, "back_s": 1.0, "worst_detect_s": 0.5, "worst_back_s": 4.0, "steps_repeated": 1, "lost": 0, "twice": 0,
    "left_behind": [], "exit_code": 75, "limit_s": seconds_limit("advantages", "sigkill"),
}  # fmt: skip


def test_a_cell_that_keeps_what_is_promised_is_good() -> None:
    assert fallen("advantages", "sigkill", GOOD) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"worst_detect_s": 1.5}, "seen after 1.50 s, limit 1 s"),
        ({"worst_back_s": 5.5}, "back after 5.50 s, limit 5 s"),
        ({"lost": 1}, "1 lost"),
        ({"twice": 2}, "2 twice"),
        ({"steps_repeated": 2}, "2 steps repeated"),
        ({"left_behind": ["7 python"]}, "['7 python'] left_behind"),
        ({"exit_code": 1}, "exit code 1"),
        ({"error": "RuntimeError: no"}, "RuntimeError: no"),
    ],
)
def test_each_broken_promise_is_told(changed: dict[str, Any], told: str) -> None:
    assert fallen("advantages", "sigkill", GOOD | changed) == [told]


def test_lines_of_a_run_are_steps_and_events() -> None:
    assert parsed(1.0, "06:10:02 step=17/100 reward=0.5") == Line(1.0, "step", {}, 17)
    died = parsed(2.0, "06:10:03 died source=supervisor group=actor-0 rank=0 cause='killed by SIGKILL'")
    assert died.is_of("died", "actor-0") and died.told["cause"] == "killed by SIGKILL"
    assert parsed(3.0, "a warning of somebody's 'own") == Line(3.0, "warning", {})


def lives(an_hour: float) -> Looks:
    """Two lives of one kind, with levels of their own, whose memory grows alike; descriptors and threads stay."""
    looks = Looks()
    for pid, level in ((1, 1e8), (2, 3e8)):
        noise = [((7 * at) % 5 - 2) * 1e4 for at in range(100)]
        looks.lives["actor", pid] = [
            (30.0 + 2.0 * at, level + an_hour * 2 * at / 3600 + noise[at], 20.0, 5.0) for at in range(100)
        ]
    return looks


def test_what_grows_is_told_from_what_differs_between_lives() -> None:
    assert [each["flat"] for each in lives(0.0).growth()["actor"].values()] == [True, True, True]
    grown = lives(1e8).growth()["actor"]
    assert grown["memory"]["an_hour"] == pytest.approx(1e8, rel=0.02) and not grown["memory"]["flat"]
    assert fit([[(0.0, 1.0), (1.0, 2.0)]]) is None


def test_the_interval_of_runs_without_deaths_is_that_of_one_more_run() -> None:
    low, high = interval([0.5, 0.52, 0.54, 0.56, 0.58])
    assert (low, high) == pytest.approx((0.54 - 0.0962, 0.54 + 0.0962), abs=1e-3)
