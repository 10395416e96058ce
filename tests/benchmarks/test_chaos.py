"""The benchmark of faults turns red where a promise is broken, and understands what a run says."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos
from benchmarks.chaos import fallen, seconds_limit
from benchmarks.chaos_run import Line, parsed
from benchmarks.soak import FLOOR_BYTES, POOL, Looks, fit, interval

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


def test_cells_of_one_role_go_among_those_that_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"processor": "P", "cores": 2, "load_before": [1.0, 0, 0]}
    older = {role: {"sigkill": GOOD | {"back_s": 9.0}, "oom": GOOD} for role in ("actor", "engine")}
    results = tmp_path / "chaos.json"
    results.write_text(json.dumps(here | {"load_before": [20.5, 0, 0], "figures": {"roles": older}}))
    (tmp_path / "actor.sigkill.json").write_text(
        json.dumps(GOOD | {"back_s": 5.0})
    )  # of another day: nobody asks for it
    (tmp_path / "engine.oom.json").write_text(json.dumps(GOOD))
    monkeypatch.setattr(chaos, "RESULTS", results)
    monkeypatch.setattr(chaos, "machine", lambda: here)
    monkeypatch.setattr(chaos, "cells", lambda *_: [("sigkill", GOOD | {"back_s": 2.0})])
    asked = ["--role", "engine", "--fault", "sigkill", "--cells", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["chaos", *asked])
    chaos.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {role: {fault: cell["back_s"] for fault, cell in row.items()} for role, row in told["roles"].items()} == {
        "actor": {"sigkill": 9.0, "oom": 1.0}, "engine": {"sigkill": 2.0, "oom": 1.0},
    }  # fmt: skip
    assert told["roles"]["actor"]["sigkill"]["load"] == 20.5 and told["command"] == "rondo bench chaos"
    assert chaos.merged(results, here | {"cores": 64}, {}) == {}


def test_lines_of_a_run_are_steps_and_events() -> None:
    assert parsed(1.0, "06:10:02 step=17/100 reward=0.5") == Line(1.0, "step", {}, 17)
    died = parsed(2.0, "06:10:03 died source=supervisor group=actor-0 rank=0 cause='killed by SIGKILL'")
    assert died.is_of("died", "actor-0") and died.told["cause"] == "killed by SIGKILL"
    assert parsed(3.0, "a warning of somebody's 'own") == Line(3.0, "warning", {})


def lives(an_hour: float, *, level: float = 1e8, descriptors: float = 0.0, threads: Sequence[float] = (5.0,)) -> Looks:
    """Two lives of one kind, with levels of their own, whose memory and descriptors grow alike; `threads` one after another, each
    for as long."""
    looks = Looks()
    for pid in (1, 2):
        noise = [((7 * at) % 5 - 2) * 1e4 for at in range(100)]
        looks.lives["actor", pid] = [
            (
                60.0 + 10.0 * at, pid * level + an_hour * 10 * at / 3600 + noise[at], 20.0 + descriptors * at // 10,
                threads[at * len(threads) // 100],
            )
            for at in range(100)
        ]  # fmt: skip
    return looks


def test_what_grows_is_told_from_what_differs_between_lives() -> None:
    assert [each["flat"] for each in lives(0.0).growth()["actor"].values()] == [True, True, True]
    grown = lives(1e8).growth()["actor"]
    assert grown["memory"]["an_hour"] == pytest.approx(1e8, rel=0.02) and not grown["memory"]["flat"]
    assert fit([[(0.0, 1.0), (1.0, 2.0)]]) is None


def test_small_processes_may_grow_by_arenas_and_pools_of_threads_may_fill_while_leaks_of_any_are_told() -> None:
    def flat(what: str, looks: Looks) -> bool:
        return bool(looks.growth()["actor"][what]["flat"])

    assert flat("memory", lives(FLOOR_BYTES * 0.9, level=1e7)) and not flat(
        "memory", lives(FLOOR_BYTES * 1.2, level=1e7)
    )
    assert flat("threads", lives(0.0, threads=[3, 4, 5, 6]))
    assert not flat("threads", lives(0.0, threads=range(3, 3 + 3 * POOL)))
    assert flat("threads", lives(0.0, threads=[3, 4 + POOL, 4 + POOL]))  # as it is from then on
    assert not flat("descriptors", lives(0.0, descriptors=1.0))


def test_the_interval_of_runs_without_deaths_is_that_of_one_more_run() -> None:
    low, high = interval([0.5, 0.52, 0.54, 0.56, 0.58])
    assert (low, high) == pytest.approx((0.54 - 0.0962, 0.54 + 0.0962), abs=1e-3)
