"""Episodes over the death of every replica in their middle, and over a stop of the run: no whole turn is sampled twice."""

from __future__ import annotations

import itertools
import os
import signal
from collections import defaultdict
from pathlib import Path

import orjson
import pytest

from rondo.comm.bus.unfinished import FOLDER
from rondo.launch.report.records import read_records
from rondo.roles.training.trained_samples import rows_of_step, steps_of
from tests.e2e.runs import ROOT, command, finish, left_behind, read_until, start
from tests.strength import LONG


def resumed(run: Path) -> int:
    """Turns that were not sampled again, by all lives of all replicas."""
    found = defaultdict[str, list[int]](lambda: [0])
    for record in read_records(run / "metrics.jsonl"):
        if "episodes" in record:
            found[record["source"]].append(record["episodes"]["turns_resumed"])
    return sum(max(0, now - had) for each in found.values() for had, now in itertools.pairwise(each))


@pytest.mark.skipif(not LONG, reason="RONDO_TEST_LONG is not set: a run, and its resume, with tools that take seconds")
def test_episodes_go_on_from_their_last_whole_turns_when_replicas_die_and_when_the_run_is_stopped(
    tmp_path: Path,
) -> None:
    run = tmp_path / "turns"
    line = [
        *command(tmp_path)[:4],
        str(ROOT / "tests/e2e/turns.py"),
        "--set",
        f"run_dir={tmp_path}",
        "--kill",
        "rollout@2",
    ]
    process = start(line, tmp_path)
    read_until(process, "step=5/8")
    os.kill(process.pid, signal.SIGTERM)
    stopped = finish(process, run)
    assert stopped.code == 75, stopped.output
    before = resumed(run)
    assert before > 0 and any((run / FOLDER).iterdir())
    ended = finish(start([*line[:3], "resume", str(run)], tmp_path), run)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"], summary["samples_trained"]) == (0, 0, 8 * 8 * 8)
    assert resumed(run) > before
    calls = defaultdict[tuple[str, int], list[str]](list)
    for name, turn, said in map(orjson.loads, (tmp_path / "calls.jsonl").read_bytes().splitlines()):
        calls[name, turn].append(said)
    again = [each for each in calls.values() if len(each) > 1]
    assert 0 < len(again) <= 2 * 2 * 128, "at most those under way at either death"
    assert all(set(each) == {each[0]} for each in again), "a turn that is there is not sampled again"
    trained = [row for step in steps_of(run) for row in rows_of_step(run, step, ["policy_versions"])]
    assert len({(row.group, row.sample) for row in trained}) == len(trained) == 8 * 8 * 8
    assert list((run / FOLDER).iterdir()) == [] and left_behind(tmp_path) == []
