from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rondo.launch.report.records import evaluation_records, step_records
from rondo.runtime.checkpoints import complete
from tests.e2e.runs import ROOT, command, left_behind
from tests.e2e.shell import Rondo, to_the_end


def test_versions_are_evaluated_while_new_weights_interrupt_samples_rewards_raise_and_hang_and_both_replicas_die(
    tmp_path: Path,
    rondo: Rondo,
) -> None:
    module = str(ROOT / "tests" / "e2e" / "evaluated.py")
    roles = f"roles={{'rollout': '{ROOT / 'tests' / 'e2e' / 'held.py'}:HeldRollout'}}"
    line = [*command(tmp_path)[:4], module, "--set", f"run_dir={tmp_path}", "--set", roles, "--kill", "rollout@4"]
    ended = to_the_end(rondo, line, tmp_path / "evaluated")
    assert ended.code == 0, ended.output
    summary, metrics = ended.summary, ended.run_dir / "metrics.jsonl"
    assert (summary["steps"], summary["restarts"]) == (8, {"rollout": 2})
    assert (summary["samples_lost"], summary["samples_trained_twice"], summary["samples_trained"]) == (0, 0, 8 * 4 * 2)
    assert summary["samples_by_outcome"]["failed"] == 2 * 2  # two prompts of two samples
    events = [orjson.loads(text) for text in (ended.run_dir / "events.jsonl").read_bytes().splitlines()]
    failed = {event["group"]: event["why"] for event in events if event.get("state") == "failed"}
    raised, hung = (failed[group] for group in sorted(failed))
    assert sum(summary["failed"].values()) == 2 and summary["quarantined"] == {}
    assert "ZeroDivisionError" in raised and "within 3 s" in hung
    found = evaluation_records(metrics)
    assert [each["version"] for each in found] == [4, 8] and list(summary["evaluations"]) == ["4", "8"]
    assert all(each["sets"].keys() == {"kept", "own"} for each in found)
    for each in found:
        own = each["sets"]["own"]  # two odd labels among four
        assert own == {"num_prompts": 4, "mean@1": 0.5, "pass@1": 0.5}
        kept = each["sets"]["kept"]  # four samples of each of four prompts, which get 0 or 1
        assert kept["mean@4"] == kept["pass@1"] <= kept["pass@4"] and kept["pass@4"] in (0.25, 0.5, 0.75, 1)
    told = [orjson.loads(text) for text in metrics.read_bytes().splitlines()]
    assert sum("evaluation" in each for each in told) == 2  # nothing is told twice
    steps = step_records(metrics)
    assert all(each["longest_wait_s"] >= 0 for each in steps)
    assert summary["longest_wait_s"] == pytest.approx(sum(each["longest_wait_s"] for each in steps) / 8) != 0
    tokens = sum(sum(each["staleness_tokens"].values()) for each in steps)
    assert tokens == sum(summary["staleness_tokens"].values()) > 0
    assert max(map(int, summary["staleness_histogram"])) <= 2
    logged = [
        orjson.loads(text) for file in (ended.run_dir / "samples").iterdir() for text in file.read_bytes().splitlines()
    ]
    assert any(len(each["versions"]) > 1 for each in logged)  # went on under other weights than it began with
    # Of two checkpoints that are as good the earlier stays, and the function after each save has seen both.
    best = orjson.loads((ended.run_dir / "best.json").read_bytes())
    assert best == {"metric": "own.mean@1", "mode": "max", "step": 4, "value": 0.5}
    assert [each.name for each in complete(ended.run_dir / "checkpoints")] == ["step_000004", "step_000008"]
    assert (ended.run_dir / "saw_4").is_dir() and (ended.run_dir / "saw_8").is_dir()
    [failure] = [event for event in events if event["kind"] == "after_save_failed"]
    assert (failure["step"], failure["num_failed"]) == (4, 1) and "OSError: no bucket" in failure["why"]

    line = [*command(tmp_path)[:3], "eval", str(ended.run_dir), "--checkpoint", "best", "--only", "own", "--plain"]
    again = to_the_end(rondo, [*line, "--set", "role_groups.0.replicas=1"], tmp_path / "evaluated-eval")
    assert again.code == 0, again.output
    told = orjson.loads((again.run_dir / "evaluation.json").read_bytes())
    assert (told["checkpoint"], told["finished"], told["num_samples"]) == ("step_000004", True, 4)
    assert told["sets"] == {"own": found[0]["sets"]["own"]}
    kept = {file: file.read_bytes().splitlines() for file in (again.run_dir / "samples").iterdir()}
    before = ended.run_dir / "samples" / "version_4.0.jsonl"
    answers = [
        sorted((each["number"], each["response"]) for each in map(orjson.loads, texts) if each["set"] == "own")
        for texts in (*kept.values(), before.read_bytes().splitlines())
    ]
    assert len(answers) == 2 and answers[0] == answers[1] and len(answers[0]) == 4
    assert (tmp_path / "latest").resolve() == ended.run_dir.resolve()
    assert left_behind(tmp_path) == []
