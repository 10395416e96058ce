"""Whole runs whose rewards a judge gives: it is learnt from, and one that dies or leaves costs no sample."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.launch.report.records import read_records, step_records
from rondo.launch.report.status import ask
from rondo.launch.rundir import supervisor_record
from tests.e2e.runs import ROOT, command, finish, left_behind, read_until, start
from tests.roles.rewards.judge import judging
from tests.strength import LONG

pytestmark = pytest.mark.skipif(not LONG, reason="takes minutes: RONDO_TEST_LONG=1")


def test_a_policy_learns_from_what_a_judge_at_a_url_says(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> str:
        response, label = body["messages"][-1]["content"].split("|")
        right = sum(a == b for a, b in zip(response, label, strict=False)) / len(label)
        return f"<score>{right if len(response) == len(label) else right / 2}</score>"

    with judging(answer) as (url, asked):
        judge = f"genrm={{'urls': ['{url}'], 'prompt': '{{response}}|{{label}}', 'tag': 'score', 'bounds': [0, 1]}}"
        alone = "reward.function=rondo.roles.rewards.function:no_reward"
        sets = (judge, alone, "num_steps=40", "sft.steps=60", "train.warmup_steps=1")
        ended = finish(start(command(tmp_path, sets=sets), tmp_path), tmp_path / "quickstart")
    assert ended.code == 0, ended.output
    steps = step_records(ended.run_dir / "metrics.jsonl")
    first, last = (sum(each["reward_mean"] for each in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.1, (first, last)
    assert ended.summary["samples_lost"] == 0 and len(asked) >= 40 * 8 * 8


def test_a_judge_that_is_killed_and_one_that_is_restarted_beside_a_scorer_cost_no_sample(tmp_path: Path) -> None:
    module = str(ROOT / "tests" / "e2e" / "judged.py")
    endless = ("--set", f"run_dir={tmp_path}", "--set", "num_steps=100000")
    line = [*command(tmp_path)[:4], module, *endless, "--kill", "genrm@3"]
    run, run_dir = start(line, tmp_path), tmp_path / "judged"
    read_until(run, "step=6/")
    record = supervisor_record(run_dir)
    assert record is not None
    for role in ("genrm", "scorer"):
        num_ready = len(told_of(run_dir, "ready"))
        while ask(record, f"/{role}/restart", {})["status"] == "CONFLICT":  # with the one before, which is ending
            read_until(run, "step=")
        while f"{role}-0" not in {event["group"] for event in told_of(run_dir, "ready")[num_ready:]}:
            read_until(run, "step=")
    run.send_signal(signal.SIGTERM)
    ended = finish(run, run_dir)
    assert ended.code == 75, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == summary["steps"] * 4 * 4
    told = [orjson.loads(text) for text in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    for name in ("genrm", "scorer"):
        judged = [each[name] for each in told if name in each][-1]
        assert judged["no_verdict"] == 0 and judged["verdicts"] >= summary["samples_trained"]
    assert left_behind(tmp_path) == []


def told_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run_dir / "events.jsonl") if record["kind"] == kind]
