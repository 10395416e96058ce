"""Whole runs with router replay, partial rollouts and updates in flight, whose trainer would choose other experts by itself; in
full on two ranks that share the experts out, also with routes that actor_fwd records, and with pictures and sounds."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rondo.launch.report.records import step_records
from tests.e2e.routed import NAME, NUM_STEPS
from tests.e2e.runs import left_behind
from tests.e2e.shell import Rondo, to_the_end
from tests.strength import LONG

IN_FULL = pytest.mark.skipif(not LONG, reason="more runs: RONDO_TEST_LONG=1")


@pytest.mark.parametrize(
    ("mode", "replay", "media"),
    [
        ("hybrid", "r3", ""),
        *(pytest.param(*each, marks=IN_FULL) for each in (
            ("fully_async", "r2", ""), ("hybrid", "r3", "pictures"), ("hybrid", "r2", "pictures"),
            ("hybrid", "r3", "sounds"), ("hybrid", "r2", "sounds"),
        )),
    ],
)  # fmt: skip
def test_recorded_experts_make_the_log_probs_of_samples_that_new_weights_interrupt_those_of_the_engine(
    tmp_path: Path, mode: str, replay: str, media: str, rondo: Rondo
) -> None:
    options = [f"train.mesh.ep={2 if LONG else 1}", f"train.router_replay={replay}", *([media] if media else [])]
    ended = to_the_end(rondo, ["-m", "tests.e2e.routed", str(tmp_path), mode, *options], tmp_path / NAME)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    steps = step_records(ended.run_dir / "metrics.jsonl")
    assert len(steps) == NUM_STEPS and sum(step.get("log_prob_gap_tokens", 0) for step in steps) > 200
    assert 0 < summary["log_prob_gap"]["all"] < 1e-5  # without replay it is 2e-3, and the run ends there
    logged = [orjson.loads(line) for file in (ended.run_dir / "samples").iterdir() for line in file.open()]
    assert any(len(line["versions"]) > 1 for line in logged)
    seen = [orjson.loads(line) for file in ended.run_dir.glob("seen.*.jsonl") for line in file.open()]
    # All that was recorded was replayed, in both layers, and once more where they are computed again.
    times = 4 if media or mode != "hybrid" else 2
    assert seen and all(each["checked"] == times * each["recorded"] for each in seen)
    if media:  # one micro-batch has them, interrupted samples, and several of a prompt that share it
        assert any(each["interrupted"] and each["media"] and each["prompts"] < each["rows"] for each in seen)
    assert left_behind(tmp_path) == []
