"""Whole runs that train adapters, of attention and of experts: they end where an engine does not compute with what it is given,
and go on from the adapters alone where an actor or an engine is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from tests.e2e.adapted import NAME, NUM_STEPS
from tests.e2e.runs import ROOT, Ended, finish, left_behind, start
from tests.strength import LONG

pytestmark = pytest.mark.skipif(not LONG, reason="whole runs: RONDO_TEST_LONG=1")


def run(folder: Path, *words: str) -> Ended:
    command = [sys.executable, "-m", "tests.e2e.adapted", str(folder), *words]
    return finish(start(command, ROOT), folder / NAME)


@pytest.mark.parametrize(
    ("fault", "steps", "told"),
    [
        ("deaf", 0, "an engine must compute with the adapters that it is given, got rollout.0"),
        ("stuck", 3, "an engine must generate with the adapter that it is given, got other tensors than version"),
    ],
)
def test_an_adapter_that_does_not_arrive_ends_the_run_with_what_it_is(
    tmp_path: Path, fault: str, steps: int, told: str
) -> None:
    ended = run(tmp_path, fault)
    assert ended.code == 1 and told in ended.output, ended.output
    assert ended.summary["steps"] <= steps
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(("run_of", "role"), [("whole", "rollout"), ("valued", "critic")])
def test_a_killed_actor_and_another_role_that_is_killed_go_on_from_the_adapters_alone(
    tmp_path: Path, run_of: str, role: str
) -> None:
    """The critic is of two processes, with adapters and a head of its own."""
    ended = run(tmp_path, run_of, "actor@5", f"{role}@11", "actor@17")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["steps"] == NUM_STEPS and summary["restarts"] == {"actor": 2, role: 1}
    assert summary["log_prob_gap"]["all"] < 1e-5
    events = [orjson.loads(line) for line in (ended.run_dir / "events.jsonl").read_bytes().splitlines()]
    assert {event["attempt"] for event in events if "attempt" in event} <= {0}
    assert left_behind(tmp_path) == []
