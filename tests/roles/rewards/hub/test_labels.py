"""Labels that no answer can equal fail their rows with words, whatever the response; all others are right against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rondo.roles.rewards import hub
from rondo.roles.rewards.scores import RewardError

JUDGES = ("exact", "boxed", "gsm8k", "multiple_choice", "gpqa", "f1", "dapo", "math", "deepscaler", "geo3k", "openr1mm")
LETTER = "C"
NONE: tuple[Any, ...] = (
    None, "", " ", float("nan"), float("inf"), [], [None], ["", None], {"ground_truth": "72", "style": "rule"}, [{"x": 1}],
        {}, [[]],
    np.array([]),
)  # fmt: skip


@pytest.mark.parametrize("name", JUDGES)
def test_a_label_that_no_answer_can_equal_is_an_error(name: str) -> None:
    for label in NONE:
        for response in ("", "None", "#### 72", "\\boxed{None}", "<answer>None</answer>", "Answer: None"):
            with pytest.raises(
                RewardError, match=r"label must be .*, got .*\. (Name another column|Take the answer out)"
            ):
                getattr(hub, name)(response, label, prompt="", metadata={})


def test_what_one_reward_alone_cannot_score_is_an_error_of_it() -> None:
    for name, label, metadata in (
        ("gsm8k", "Paris", {}), ("gsm8k", "1 or 2", {}), ("f1", "!", {}), ("f1", "the", {}), ("gpqa", "Z", {"choices": ["x",
            "y"]}),
        ("gpqa", 7, {"choices": ["x", "y"]}), ("gpqa", "z", {"choices": ["x", "y"]}),
    ):  # fmt: skip
        with pytest.raises(RewardError, match="label must be"):
            getattr(hub, name)("Answer: x", label, prompt="", metadata=metadata)


@pytest.mark.parametrize("name", JUDGES)
def test_a_label_written_as_the_rewards_answers_are_is_right(name: str) -> None:
    reward = getattr(hub, name)
    for label in ("72", 72, 72.0, "-3", ["72", "73"], np.array([72, 73]), LETTER, "0.5"):
        if (name == "gsm8k" and label is LETTER) or (name == "gpqa" and label is not LETTER):
            continue
        score = reward(reward.writes(label), label, prompt="", metadata={})
        assert (score.get("accuracy") if isinstance(score, dict) else score) == 1, label
    assert reward("no", "C" if name != "gsm8k" else "72", prompt="", metadata={}) != 1
