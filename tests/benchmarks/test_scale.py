"""Replicas that come and leave under load while somebody is killed, as `rondo bench scale` measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.chaos_run import Line
from benchmarks.scale import CHANGES, step_gaps
from tests.e2e.runs import ROOT
from tests.strength import LONG


def test_a_step_counts_for_the_change_that_it_ended_in() -> None:
    lines = [Line(at, kind, {}) for at, kind in ((1, "step"), (2, "ready"), (4, "step"), (5, "step"), (9, "step"))]
    assert step_gaps(lines) == [3, 1, 4]
    assert step_gaps(lines, 4.5, 8) == [1]


@pytest.mark.skipif(not LONG, reason="takes minutes: RONDO_TEST_LONG=1")
def test_nothing_is_lost_or_twice_while_replicas_come_and_leave_and_somebody_dies() -> None:
    line = [sys.executable, "-m", "benchmarks.scale", "--rounds", "2", "--quiet", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["twice"], found["exit_code"], found["left_behind"]) == (0, 0, 75, [])
    changes = [row for row in found.values() if isinstance(row, dict) and "ended_as" in row]
    assert len(changes) == 2 * len(CHANGES)
    assert {status for row in changes for status in row["ended_as"]} == {"ACTIVE", "COMPLETED"}
