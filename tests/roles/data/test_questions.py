"""Questions: a row without its answer, which is what the reward is told."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row
from rondo.roles.data.questions import Questions

ASKED = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "31"}]
SAID = [{"role": "assistant", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "3"}]}]


class One:
    def __init__(self, row: Row) -> None:
        self._row = row

    def __len__(self) -> int:
        return 1

    def row(self, index: int) -> Row:
        return self._row


@pytest.mark.parametrize(
    ("row", "label"),
    [
        (Row("r", "31>", "13", {}), "answer"),
        (Row("r", "31>", "13", {}, rejected="31"), "chosen"),
        (Row("r", ASKED + SAID, None, {}), None),
        (Row("r", ASKED + SAID, None, {}, rejected=[{"role": "assistant", "content": "31"}]), None),
        (Row("r", ASKED, ASKED + SAID, {}, rejected="31"), "chosen"),
    ],
)
def test_the_answer_of_a_row_is_its_label_and_no_part_of_its_prompt(row: Row, label: Any) -> None:
    source = DataConfig(path="unused", label=label, apply_chat_template=isinstance(row.prompt, list))
    found = Questions(One(row), source).row(0)
    assert (found.prompt, found.label, found.rejected) == (ASKED if isinstance(row.prompt, list) else "31>", "13", None)
