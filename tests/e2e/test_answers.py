"""Answers of a job without rollouts are measured beside its training, whoever dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rondo.launch.report.records import evaluation_records, step_records
from tests.e2e.runs import ROOT, finish, left_behind, start
from tests.strength import LONG

SETS = (
    "sft.steps=12", "sft.warmup_steps=2", "sft.batch_size=8", "sft.evaluate_every=6", "sft.data.held_out=16",
    "sft.data.limit=500", "train.save_every=4", "evaluation.num_prompts=16", "evaluation.every=3",
    "model.build_args={'hidden_size': 32, 'num_layers': 1}",
)  # fmt: skip
GROUPS = {
    "apart": (),
    "together": ("role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages'], 'processes': 2}]",),
}


@pytest.mark.skipif(not LONG, reason="two runs of a minute")
@pytest.mark.parametrize("mode", GROUPS)
def test_every_version_that_is_due_is_measured_once_and_no_step_is_lost_through_deaths(
    mode: str, tmp_path: Path
) -> None:
    sets = [part for text in (*SETS, *GROUPS[mode], "seed=3", f"run_dir={tmp_path}/runs") for part in ("--set", text)]
    kills = ["--kill", "rollout@4", "--kill", "actor@7"] if mode == "apart" else ["--kill", "actor@7"]
    line = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples" / "sft.py"), *sets, *kills]
    ended = finish(start(line, tmp_path), tmp_path / "runs" / "sft")
    assert ended.code == 0, ended.output
    metrics = ended.run_dir / "metrics.jsonl"
    assert [record["step"] for record in step_records(metrics)] == list(range(12))
    found = {record["version"]: record for record in evaluation_records(metrics)}
    assert list(found) == [0, 3, 6, 9, 12]
    assert all(record["num_samples"] == 16 and "mean@1" in record["sets"]["held_out"] for record in found.values())
    assert {version for version, record in found.items() if "eval_loss" in record.get("figures", {})} == {0, 6, 12}
    assert ended.summary["restarts"] == ({"rollout": 1, "actor": 1} if mode == "apart" else {"actor": 1})
    assert left_behind(tmp_path) == []
