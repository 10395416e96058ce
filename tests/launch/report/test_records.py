"""Records of a metrics.jsonl: those of the branch that a run goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.report.records import evaluation_records, read_metrics, step_records
from rondo.launch.report.steps import read_steps
from rondo.runtime.checkpoints import goes_on_from


def step(number: int, loss: float) -> dict[str, Any]:
    return {"time": 1.0, "kind": "metrics", "step": number, "version": number + 1, "reward_mean": loss, "loss": loss}


def critic(number: int, loss: float) -> dict[str, Any]:
    return {"time": 1.0, "kind": "metrics", "critic": {"step": number, "value_loss": loss}}


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {"time": 1.0, "kind": "metrics", "evaluation": {"version": version, "reward": reward}}


FIRST = [evaluation(0, 0.0), *(step(number, 1.0) for number in range(6)), evaluation(2, 1.0), evaluation(6, 1.0)]


@pytest.mark.parametrize(
    "later, steps, evaluations",
    [
        ([], {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, {0: 0, 2: 1, 6: 1}),
        ([2], {0: 1, 1: 1}, {0: 0, 2: 1}),  # a run that goes on, and has yet to train a step
        ([2, step(2, 2.0), evaluation(3, 2.0)], {0: 1, 1: 1, 2: 2}, {0: 0, 2: 1, 3: 2}),
        ([4, step(4, 2.0), 1, step(1, 3.0)], {0: 1, 1: 3}, {0: 0}),
        ([1, step(1, 2.0), step(2, 2.0), 2, step(2, 3.0)], {0: 1, 1: 2, 2: 3}, {0: 0}),
        ([6, step(6, 2.0)], {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2}, {0: 0, 2: 1, 6: 1}),  # nothing is behind it
        ([step(3, 2.0)], {0: 1, 1: 1, 2: 1, 3: 2}, {0: 0, 2: 1}),  # of a release that did not write down from where
        ([step(5, 2.0)], {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2}, {0: 0, 2: 1}),
        ([0], {}, {0: 0}),
    ],
)
def test_what_a_run_told_of_steps_that_it_went_back_behind_counts_no_more(
    tmp_path: Path, later: list[Any], steps: dict[int, float], evaluations: dict[int, float]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for record in [*FIRST, *later]:
        if isinstance(record, int):
            goes_on_from(tmp_path, record)
        else:
            with metrics.open("a") as file:
                file.write(json.dumps(record) + "\n")
    assert {record["step"]: record["loss"] for record in step_records(metrics)} == steps
    assert {record["version"]: record["reward"] for record in evaluation_records(metrics)} == evaluations


def test_records_of_a_critic_follow_and_those_of_processes_stay(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    process = {"time": 1.0, "kind": "metrics", "source": "rollout-0", "waits_s": {"x": 1.0}}
    records = [critic(0, 1.0), critic(1, 1.0), process]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    goes_on_from(tmp_path, 1)
    assert list(read_metrics(metrics))[:-1] == [critic(0, 1.0), process]


def test_steps_that_are_explained_are_those_of_the_branch_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    use = {"trainer": {}, "longest_s": 0.0, "roles": {}, "step_s": 1.0}
    text = "".join(json.dumps(use | {"step": number, "start": float(number)}) + "\n" for number in range(4))
    (tmp_path / "timeline" / "steps.jsonl").write_text(text)
    assert [each.step for each in read_steps(tmp_path, [])] == [0, 1, 2, 3]
    goes_on_from(tmp_path, 2)
    assert [each.step for each in read_steps(tmp_path, [])] == [0, 1]
