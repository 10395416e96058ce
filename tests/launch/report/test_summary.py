"""The summary: what is read from a run's files, and that the table says the same."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rondo.launch.report.plot import evaluation_lines
from rondo.launch.report.records import evaluation_records, step_records
from rondo.launch.report.summary import Summary, print_table, read, rows, summarize, waits_by_role, write


def step(number: int, time: float, reward: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"time": time, "source": "actor-0", "kind": "metrics", "step": number, "reward_mean": reward, **more}


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {
        "time": 0.0,
        "source": "rollout-0",
        "kind": "metrics",
        "evaluation": {"version": version, "reward": reward, "num_prompts": 8},
    }


def run_with(folder: Path, records: Iterable[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_rewards_before_and_after_are_those_of_the_first_and_last_version(tmp_path: Path) -> None:
    run = run_with(tmp_path, [evaluation(0, 0.1), step(0, 105.0), step(1, 106.0), evaluation(2, 0.7)])
    summary = summarize(run, exit_code=0, wall_s=9.5, started=100.0)
    assert (summary.reward_before, summary.reward_after) == (0.1, 0.7)
    assert (summary.steps, summary.first_step_s, summary.wall_s) == (2, 5.0, 9.5)


def test_rewards_that_failed_are_told_beside_the_mean_of_the_others_and_are_no_0(tmp_path: Path) -> None:
    none, some = evaluation(0, 0.5), evaluation(2, 0.7)
    none["evaluation"] |= {"reward": None, "num_samples": 8, "num_failed": 8, "sets": {"kept": {"num_prompts": 8}}}
    some["evaluation"] |= {"num_samples": 8, "num_failed": 1}
    steps = [step(number, 1.0, num_samples=64, num_failed=number) for number in range(3)]
    summary = summarize(run_with(tmp_path, [none, *steps, some]), exit_code=0, wall_s=1.0)
    assert (summary.reward_before, summary.reward_after) == (None, 0.7)
    assert summary.failed_rewards == {"before": (8, 8), "after": (8, 1), "trained": (192, 3)}
    assert list(rows(summary))[:3] == [
        ("reward_before", "- (of 8, 8 failed)"),
        ("reward_after", "0.700 (of 8, 1 failed)"),
        ("failed_rewards", "of 192, 3 failed"),
    ]
    assert evaluation_lines([none["evaluation"]]) == {}


def test_one_evaluation_says_nothing_about_after(tmp_path: Path) -> None:
    summary = summarize(run_with(tmp_path, [evaluation(0, 0.1)]), exit_code=75, wall_s=1.0)
    assert (summary.reward_before, summary.reward_after, summary.steps) == (0.1, None, 0)


def test_a_step_that_ran_again_counts_once_and_as_its_last_run(tmp_path: Path) -> None:
    first = step(1, 2.0, reward=0.2)
    again = step(1, 3.0, reward=0.3)
    run = run_with(tmp_path, [step(0, 1.0), first, again])
    steps = step_records(run / "metrics.jsonl")
    assert [record["reward_mean"] for record in steps] == [0.5, 0.3]


def test_waits_of_a_process_that_was_replaced_stay_counted() -> None:
    def record(source: str, seconds: float) -> dict[str, Any]:
        return {"source": source, "waits_s": {"weights": seconds}}

    records = [record("rollout-0", 2.0), record("rollout-0", 5.0), record("rollout-0", 1.0), record("rollout-1", 4.0)]
    assert waits_by_role(iter(records)) == {"rollout": {"weights": 10.0}}


def test_quarantined_groups_are_counted_by_cause_and_a_cause_is_told_without_its_row(tmp_path: Path) -> None:
    def error(group: int, why: str, state: str = "quarantined") -> dict[str, Any]:
        return {"source": "coordinator", "kind": "group_error", "group": group, "why": why, "state": state}

    told = [
        error(1, "rows:7: image must be whole, got a broken file", "waiting"),
        *(error(group, f"rows:{group}: image must be whole, got a broken file") for group in (1, 2)),
        error(3, "reward of rows:3, sample 0: Traceback\n  line 1\nZeroDivisionError: division by zero"),
        *(error(row, f"all of them failed: reward of rows row {row}, sample 1: score: none") for row in (149, 171)),
    ]
    told += [{"kind": "left_out", "why": f"rows:{row}: prompt must have 1 to 8 tokens, got 9"} for row in (5, 6, 5)]
    told += [{"kind": "sft", "skipped": skipped} for skipped in (1, 4)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in told))
    summary = summarize(run_with(tmp_path, []), exit_code=0, wall_s=1.0)
    assert summary.left_out == {"prompts": 2, "demonstrations": 4}
    assert summary.quarantined == {
        "image must be whole, got a broken file": 2,
        "ZeroDivisionError: division by zero": 1,
        "score: none": 2,
    }


def test_the_largest_gap_of_any_step_is_told_for_each_modality(tmp_path: Path) -> None:
    run = run_with(
        tmp_path,
        [
            step(0, 1.0, log_prob_gap=1e-6, log_prob_gap_image=3e-6, log_prob_gap_image_max=1.0, log_prob_gap_tokens=9),
            step(1, 2.0, log_prob_gap=2e-6, log_prob_gap_image=1e-6, log_prob_gap_k3=5.0),
        ],
    )
    assert summarize(run, exit_code=0, wall_s=1.0).log_prob_gap == {"all": 2e-6, "image": 3e-6}


def test_the_explained_variance_of_a_critic_is_told_of_its_first_and_last_steps_as_they_ran_last(
    tmp_path: Path,
) -> None:
    def told(number: int, variance: float | None) -> dict[str, Any]:
        found = {} if variance is None else {"explained_variance": variance}
        return {"kind": "metrics", "critic": {"step": number, **found}}

    values = [-1.0, *(number / 20 for number in range(1, 20))]
    again = [told(0, 0.0), told(20, None)]  # after a restart; and a step whose returns are all equal
    run = run_with(tmp_path, [step(0, 1.0), *(told(*each) for each in enumerate(values)), *again])
    summary = summarize(run, exit_code=0, wall_s=1.0)
    assert summary.explained_variance == pytest.approx({"first": 0.025, "last": 0.925})
    assert dict(rows(summary))["explained_variance"] == "first=0.025 last=0.925"
    assert summarize(run_with(tmp_path, [step(0, 1.0)]), exit_code=0, wall_s=1.0).explained_variance == {}


def test_the_file_is_the_same_as_the_summary(tmp_path: Path) -> None:
    summary = summarize(
        run_with(tmp_path, [step(0, 1.0)]),
        exit_code=1,
        wall_s=3.0,
        restarts={"actor": 2},
        recovery_s={"actor": 4.25},
        first_cause="actor-0 rank 0 ended with signal 9",
    )
    assert read(tmp_path) is None
    write(tmp_path, summary)
    assert read(tmp_path) == summary


def test_a_file_that_lacks_fields_is_no_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"name": "demo"}')
    assert read(tmp_path) is None


def test_the_lines_off_a_terminal_hold_every_figure() -> None:
    summary = Summary(
        name="demo",
        exit_code=0,
        attempt=0,
        steps=40,
        wall_s=61.23,
        reward_before=0.0312,
        reward_after=0.9,
        samples_admitted=640,
        samples_trained=640,
        samples_lost=0,
        samples_trained_twice=0,
        samples_by_outcome={"quarantined": 8},
        quarantined={"image must be whole": 1},
        log_prob_gap={"all": 1.25e-6, "image": 2e-6},
        restarts={"actor": 1},
        recovery_s={"actor": 4.25},
        waits_s={"actor": {"round": 1.0, "commit": 2.0}},
    )
    text = io.StringIO()
    print_table(summary, Console(file=text, width=20))
    assert [line.split() for line in text.getvalue().splitlines()] == [
        ["reward_before", "0.031"],
        ["reward_after", "0.900"],
        ["steps", "40"],
        ["samples_admitted", "640"],
        ["samples_trained", "640"],
        ["samples_lost", "0"],
        ["samples_trained_twice", "0"],
        ["samples_by_outcome", "quarantined=8"],
        ["quarantined", "1", "x", "image", "must", "be", "whole"],
        ["log_prob_gap", "all=1.3e-06", "image=2e-06"],
        ["restarts", "actor=1"],
        ["recovery_s", "actor=4.2"],
        ["wall_s", "61.2"],
        ["waits_s.actor", "commit=2.0", "round=1.0"],
        ["exit_code", "0"],
    ]


def test_the_table_on_a_terminal_holds_the_first_cause() -> None:
    text = io.StringIO()
    summary = Summary(name="demo", exit_code=1, attempt=0, steps=0, wall_s=1.0, first_cause="actor-0: killed [9]")
    print_table(summary, Console(file=text, width=80, force_terminal=True))
    assert "actor-0: killed [9]" in text.getvalue()


def test_a_line_that_a_killed_process_left_half_written_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(evaluation(0, 0.5)) + '\n{"time": 1.0, "st')
    assert [record["version"] for record in evaluation_records(file)] == [0]


@pytest.mark.parametrize(
    "line",
    [
        5, None, [], "text", {"step": "x", "reward_mean": 1, "time": 1}, {"step": 1, "reward_mean": 1},
        {"step": 1, "job": "sft", "time": 1},
        step(1, 1.0) | {"reward_mean": "high"}, step(1, 1.0) | {"source": 7}, step(1, 1.0, log_prob_gap="x"),
        step(1, 1.0, staleness_tokens=[1]), step(1, 1.0, staleness_tokens={"0": "x"}), step(1, 1.0, left_out=3),
        step(1, 1.0, waits_s={"weights": []}), step(1, 1.0, num_samples="8"), step(1, 1.0, reward_mean_image=[]),
        {"evaluation": 3}, {"evaluation": {}}, {"evaluation": {"version": "3"}}, {"evaluation": {"version": 3, "sets": []}},
        {"evaluation": {"version": 3, "sets": {"kept": {"mean@1": "x"}}}}, {"evaluation": {"version": 3, "label": 1}},
        {"critic": 1}, {"critic": {}}, {"critic": {"step": 1, "explained_variance": "x"}},
    ],
)  # fmt: skip
def test_a_line_of_another_shape_is_left_out_with_a_count_and_the_summary_has_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: Any
) -> None:
    run = run_with(tmp_path, [step(0, 1.0), line, evaluation(1, 0.5)])
    (run / "events.jsonl").write_text(
        json.dumps(line) + '\n{"kind": "group_error", "state": "failed"}\n{"kind": "left_out"}\n'
    )
    summary = summarize(run, exit_code=0, wall_s=1.0)
    assert (summary.steps, summary.reward_before) == (1, 0.5)
    assert "metrics.jsonl has 1 lines of another shape" in caplog.text


def test_a_summary_is_there_also_where_parts_of_the_run_cannot_be_read(tmp_path: Path) -> None:
    run = run_with(tmp_path, [evaluation(0, 0.5)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time": 1.0, "st\n' + json.dumps(evaluation(3, 0.75)).encode() + b"\n")
    (run / "config.resolved.json").write_text('{"rollout": {"samp')
    (run / "journal").mkdir(exist_ok=True)
    (run / "journal" / "00000001.journal").write_bytes(b"a hole\nof a power loss\n")
    summary = summarize(run, exit_code=75, wall_s=1.0, untold={"events.jsonl": 3})
    assert (summary.exit_code, summary.reward_after, summary.samples_lost) == (75, 0.75, None)
    assert dict(rows(summary))["untold"] == "events.jsonl=3"


def test_the_figures_of_every_set_and_version_are_in_the_summary_and_the_curves(tmp_path: Path) -> None:
    def found(version: int, value: float) -> dict[str, Any]:
        record = evaluation(version, value)
        sets = {"easy": {"mean@2": value, "pass@1": value, "pass@2": 1.0, "num_prompts": 4}, "hard": {"mean@1": 0.25}}
        return record | {"evaluation": record["evaluation"] | {"sets": sets}}

    run = run_with(tmp_path, [found(4, 0.1), found(2, 0.5), found(4, 0.75)])  # version 4 again, after a restart
    summary = summarize(run, exit_code=0, wall_s=1.0)
    assert summary.evaluations == {
        "2": {"easy mean@2": 0.5, "easy pass@1": 0.5, "easy pass@2": 1.0, "hard mean@1": 0.25},
        "4": {"easy mean@2": 0.75, "easy pass@1": 0.75, "easy pass@2": 1.0, "hard mean@1": 0.25},
    }
    assert ("evaluation.2", "easy mean@2=0.500  easy pass@1=0.500  easy pass@2=1.000  hard mean@1=0.250") in rows(
        summary
    )
    assert evaluation_lines(evaluation_records(run / "metrics.jsonl")) == {
        "easy mean@2": [(2, 0.5), (4, 0.75)],
        "easy pass@2": [(2, 1.0), (4, 1.0)],
        "hard mean@1": [(2, 0.25), (4, 0.25)],
    }
