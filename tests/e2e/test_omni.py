"""Text, image, audio and video through the whole path, with rows that cannot be used and processes that die."""

from __future__ import annotations

from pathlib import Path

import orjson

from rondo.launch.report.records import step_records
from tests.e2e.omni import proved_by_reference
from tests.e2e.runs import ROOT, command, left_behind
from tests.e2e.shell import Rondo, to_the_end


def test_every_modality_trains_through_deaths_and_what_is_broken_is_quarantined_with_its_cause(
    tmp_path: Path, rondo: Rondo
) -> None:
    module = str(ROOT / "tests" / "e2e" / "omni.py")
    settings = ("--set", f"run_dir={tmp_path}", "--set", f"reward.function={module}:behind_the_reference")
    line = [*command(tmp_path)[:4], module, *settings, "--kill", "rollout@2", "--kill", "actor@4"]
    ended = to_the_end(rondo, line, tmp_path / "omni")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["steps"], summary["attempt"], summary["restarts"]) == (6, 0, {"rollout": 1, "actor": 1})
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == 6 * 6 * 4
    quarantined = summary["quarantined"]
    assert sum(quarantined.values()) * 4 == summary["samples_by_outcome"]["quarantined"]
    assert sum(quarantined.values()) >= 3 and len(quarantined) >= 3
    # A step all of whose rows are of an older version, which nobody scored under it, has nothing to compare.
    steps = list(step_records(ended.run_dir / "metrics.jsonl"))
    assert steps[0]["staleness_mean"] == 0 and all(f"log_prob_gap_{kind}" in steps[0] for kind in summary["modalities"])
    assert all("log_prob_gap" in record for record in steps if record["staleness_mean"] < 1)
    # The reference was the actor of version 0, and then of one in three; the KL to it was told of every step.
    proved = proved_by_reference(ended.run_dir)
    assert proved[0] == 0 and len(proved) >= 2 and len({version // 3 for version in proved}) == len(proved)
    assert all("kl" in record for record in steps)
    kinds = summary["modalities"]
    assert summary["log_prob_gap"].keys() == {"all", *kinds} and kinds.keys() >= {"text", "image", "audio", "video"}
    assert all(0 < found["num_samples"] <= summary["samples_trained"] for found in kinds.values())
    figures = {"num_samples", "reward_first", "reward_last", "response_tokens", "clip_fraction"}
    assert any(found.keys() == figures for found in kinds.values())
    assert max(summary["log_prob_gap"].values()) < 1e-5
    warmed = [orjson.loads(text) for text in (ended.run_dir / "events.jsonl").read_bytes().splitlines()]
    assert max(event["skipped"] for event in warmed if event["kind"] == "sft") > 0
    assert left_behind(tmp_path) == []
