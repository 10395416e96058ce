"""The check of labels: those that no answer equals are told with their row, column and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rondo.launch.check import child as check_child
from rondo.launch.check.findings import Report
from rondo.launch.check.labels import look_at_labels
from rondo.launch.config import load
from rondo.roles.config import RewardConfig
from rondo.roles.data.datasets import Row
from tests.launch import configs

STRUCT = {"ground_truth": "72", "style": "rule"}


def told(labels: list[Any], function: Any = "gsm8k", metadata: Any = None, **settings: Any) -> list[tuple[str, str]]:
    report, rows = Report(), [Row(f"row {at}", "6 * 12", label, metadata or {}) for at, label in enumerate(labels)]
    look_at_labels("data", "answer", rows, RewardConfig(function=function, **settings), report)
    return [(finding.level, finding.text) for finding in report.findings]


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        ("gsm8k", ["72", "6 * 12 = 72\n#### 72", 72, "1,234", "-3", "$5"]),
        ("math", ["72", "\\frac{1}{2}", "(1, 2)", "east", "10 km", "x \\geq 7", "\\boxed{7}"]),
        ("multiple_choice", ["B", "(B)", "<answer>B</answer>", "red car"]),
        ("gpqa", ["B", 1, "(C)", "Paris"]),
        ("dapo", ["34", "34.0", "\\sqrt{2}"]),
        ("tags", [None, STRUCT]),
        ("code", [STRUCT]),
    ],
)
def test_labels_that_are_right_against_themselves_are_not_told(function: str, labels: list[Any]) -> None:
    assert told(labels, function) == []


def test_a_struct_as_label_is_an_error_with_its_row_its_column_and_what_to_do() -> None:
    [(level, text)] = told([STRUCT, STRUCT])
    assert level == "error"
    assert text.startswith(
        "data: 2 of 2 labels cannot be scored as right; the first: row 0, column 'answer': label must be a number"
    )
    assert "got {'ground_truth': '72', 'style': 'rule'}. Take the answer out of it with data.transform" in text


def test_labels_of_which_some_cannot_be_scored_are_a_note() -> None:
    [(level, text)] = told(["72", None, "71 or 72"])
    assert level == "note" and "2 of 3 labels" in text and "row 1, column 'answer'" in text


def test_a_label_that_its_reward_calls_wrong_is_told_with_the_answer_that_was_tried() -> None:
    [(level, text)] = told(["\\{1, 2"], "boxed")
    assert (
        level == "error"
        and "label must score as right against itself with boxed, got 0.0 for '\\\\boxed{\\\\{1, 2}'" in text
    )


def test_each_row_is_tried_on_the_functions_that_score_it() -> None:
    assert told(["72", None], {"a": "gsm8k", "*": "tags"}, {"source": "b"}, by="source") == []
    [(_, text)] = told([None], {"a": "gsm8k", "*": "tags"}, {"source": "a"}, by="source")
    assert "1 of 1 labels" in text
    [(_, text)] = told(["east"], {"a": "gsm8k", "b": "math"}, components={"a": 1, "b": 1})
    assert "1 of 2 labels" in text


def test_the_check_of_data_looks_at_labels(tmp_path: Path) -> None:
    (tmp_path / "some_rows.py").write_text(f"def rows():\n    return [{{'prompt': '1', 'label': {STRUCT}}}] * 3\n")
    sets = ["data.held_out=0", "evaluation=null", "reward.function=gsm8k"]
    config = load(
        configs.write(tmp_path), [f"run_dir={tmp_path}/runs", f"data.rows={tmp_path}/some_rows.py:rows", *sets]
    )
    report = Report()
    check_child.look_at_data(config, report, [], [])
    assert "3 of 3 labels cannot be scored as right" in "".join(
        each.text for each in report.findings if each.level == "error"
    )
