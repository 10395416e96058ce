"""Every algorithm as a run of its own, in every mode, on-policy and stale: steps are whole, and what they tell is finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.algorithms import QUICKSTART, settings_of
from rondo.launch.report.records import step_records
from rondo.roles.algorithms.algorithm import ALGORITHMS
from tests.e2e.runs import SMALL, command, finish, start
from tests.strength import LONG


@pytest.mark.skipif(not LONG, reason="takes half an hour: RONDO_TEST_LONG=1")
@pytest.mark.parametrize("mode", ["colocate:0", "hybrid:1", "fully_async:4"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    drift, updates = {"m2po": "m2", "p3o": "ess"}.get(name), 1 if name in ("m2po", "p3o") else 2
    settings = [*SMALL, *settings_of(name, mode, 0, 1e-4, 4, tmp_path), "train.warmup_steps=1"]
    if ALGORITHMS[name].get("needs_dynamic_sampling"):
        settings.append("sft.steps=120")  # some are right, so that not all groups are filtered
    settings.append(f"train.num_mini_batches={updates}")
    line = [*command(tmp_path)[:4], str(QUICKSTART), *(part for text in settings for part in ("--set", text))]
    ended = finish(start(line, tmp_path), tmp_path / "cell")
    assert ended.code == 0, ended.output
    steps = step_records(ended.run_dir / "metrics.jsonl")
    assert len(steps) == 4 and (ended.summary["samples_lost"], ended.summary["samples_trained_twice"]) == (0, 0)
    for record in steps:
        assert (record["num_updates"], record["skipped"]) == (updates, 0)
        assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
    assert drift is None or all((drift in record) == (mode != "colocate:0") for record in steps)
