"""A whole run with router replay, partial rollouts and updates in flight, whose trainer would choose other experts by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from rondo.launch.report.records import step_records
from tests.e2e.routed import NAME, NUM_STEPS
from tests.e2e.runs import ROOT, finish, left_behind, start


def test_recorded_experts_make_the_log_probs_of_samples_that_new_weights_interrupt_those_of_the_engine(
    tmp_path: Path,
) -> None:
    ended = finish(start([sys.executable, "-m", "tests.e2e.routed", str(tmp_path), "hybrid"], ROOT), tmp_path / NAME)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    steps = step_records(ended.run_dir / "metrics.jsonl")
    assert len(steps) == NUM_STEPS and sum(step.get("log_prob_gap_tokens", 0) for step in steps) > 200
    assert 0 < summary["log_prob_gap"]["all"] < 1e-5  # without replay it is 2e-3, and the run ends there
    logged = [orjson.loads(line) for file in (ended.run_dir / "samples").iterdir() for line in file.open()]
    assert any(len(line["versions"]) > 1 for line in logged)
    assert left_behind(tmp_path) == []
