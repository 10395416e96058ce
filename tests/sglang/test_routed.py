"""A whole run with router replay on a server that rondo starts, whose trainer would choose other experts by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from tests.e2e.routed import NAME, NUM_STEPS
from tests.e2e.runs import ROOT, left_behind, start
from tests.sglang.served_runs import events, finish
from tests.sglang.servers import environment, python


def test_experts_that_a_server_tells_are_replayed_also_of_samples_that_new_weights_abort(tmp_path: Path) -> None:
    sglang = {"python": python(), "environment": environment(), "pause": "abort"}
    sets = [f"rollout.sglang={orjson.dumps(sglang).decode()}", "rollout.max_interruptions=null"]
    sets.append("roles={}")  # what holds a sample holds the embedded engine
    running = start([sys.executable, "-m", "tests.e2e.routed", str(tmp_path), "hybrid", *sets], ROOT)
    ended = finish(running, tmp_path / NAME)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == NUM_STEPS * 4 * 4
    [found] = events(ended.run_dir, "sglang")
    assert found["experts"] == {"num_layers": 2, "top_k": 2, "num": 4}
    print(f"log-prob difference to a trainer with other routes of its own: {summary['log_prob_gap']}")
    assert 0 < summary["log_prob_gap"]["all"] < 1e-5  # without replay it is 2e-3, and the run ends there
    assert left_behind(tmp_path) == []
