r"""math: written answers, in a box and without one, with the verdict of a careful person."""

from __future__ import annotations

import pytest

from rondo.roles.rewards.hub import symbolic
from tests.roles.rewards.hub.judging import HEDGED, NAMED, Table, misjudged, score_of, size
from tests.roles.rewards.hub.mathematics import INSIDE

WHOLE: Table = {
    "72": (
        (
            "So the total is $\\boxed{72}$.", "\\boxed{71}, no: \\boxed{72}", "\\fbox{72}", "\\boxed {72}", "72", "$72$",
            "\\(72\\)", "\\[72\\]",
            "$$x = 72$$", "x = 72", "The answer is 72.", "The answer is $72$.", "**Answer:** 72", "Answer: 72",
            "Final answer: **72**",
            "So it is $72$.", "Therefore the total is 72.", "We add 48 and 24. Hence $x = 72$.", "#### 72",
            "<answer>72</answer>",
            "6 \\cdot 12 = 72", "The sum is 48 + 24 = 72.", "The answer is 71. No: the answer is 72.",
            "Option 3 is wrong. The answer is 72", "The answer is 72!", "#### 72!", "**Final Answer**\n\n72", "### Answer\n72",
            "\\boxed{71}\n\nWait, that's wrong. It should be \\boxed{72}", "\\boxed{72}\n\nNo other value works.",
            "It is not 71, so $\\boxed{72}$.", "\\boxed{72}\n\nThis is not a surprise.", "72</s>",
        ),
        (
            "\\boxed{72", "\\boxed{72} and then \\boxed{73}", "\\boxed{72} or \\boxed{73}", "\\boxed{73} or \\boxed{72}",
            "\\boxed{}",
            "<think>\\boxed{72}", "<think>\\boxed{72}</think>", "\\boxed{72}</think>", "The answer is 72 or 73.",
            "The answer is not 72.", "I do not know, though I tried 72", "She sold 72 clips and then had lunch", "Step 72",
            "I tried $72$ first",
            "The answer is 73, not 72", "71 = 72", "Page 72", "(see equation 72)", "", "It isn't 72.",
            "\\boxed{72}\n\nWait, that's wrong. It should be 73.", "\\boxed{72} is wrong; the answer is 73",
            "The wrong answer is 72", "It is not the case that the answer is 72", "The wrong answer is \\boxed{72}",
            "It is not \\boxed{72}", "\\boxed{72}. Sorry, I meant 73.", "The final answer is: $\\boxed{72",
            "The answer is 72. No, 73.",
        ),
    ),
    "1, 2": (("\\boxed{1}, \\boxed{2}", "\\boxed{1} and \\boxed{2}"), ("\\boxed{2}",)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "_PROCESSOR_S", 60.0)


def test_written_answers_are_judged_as_by_a_careful_person() -> None:
    assert size(WHOLE) >= 40
    assert misjudged("math", INSIDE, "So it is $\\boxed{{}}$.") == []
    assert misjudged("math", WHOLE) == []
    assert misjudged("math", {"72": (NAMED, HEDGED)}, "It is $\\boxed{{}}$") == []
    assert misjudged("math", {"72": (NAMED, HEDGED)}, "The answer is {}") == []


def test_as_published_math_verify_takes_the_last_expression() -> None:
    theirs = {"She sold 72 clips": 1, "<think>\\boxed{72}": 1, "\\boxed{73}": 0}
    assert {said: score_of("math", said, "72", as_published=True) for said in theirs} == theirs


def test_deepscaler_judges_a_box_behind_a_thought() -> None:
    assert misjudged("deepscaler", INSIDE, "<think>72 or 2?</think>It is $\\boxed{{}}$.") == []
    wrong = [
        "\\boxed{72}",
        "<think>\\boxed{72}",
        "<think>\\boxed{72}</think>",
        "<think>x</think>72",
        "<think>x</think>\\boxed{72",
    ]
    right = ["x</think>\\boxed{72}", "<think>\\boxed{71}</think>\\boxed{72}", "###Response \\boxed{72}"]
    assert misjudged("deepscaler", {"72": (right, wrong)}) == []


def test_geo3k_judges_a_box_and_the_form() -> None:
    assert misjudged("geo3k", INSIDE, "<think>72 or 2?</think>It is $\\boxed{{}}$.") == []
    wrong = ["<think>\\boxed{72}", "<think>\\boxed{72}</think>", "<think>x</think>72", "72", "\\boxed{72} <think>no"]
    assert misjudged("geo3k", {"72": (["\\boxed{72}", "<think>x</think>\\boxed{72}"], wrong)}) == []


def test_openr1mm_judges_an_answer() -> None:
    assert misjudged("openr1mm", INSIDE, "<think>72 or 2?</think><answer>{}</answer>") == []
    wrong = [
        "<answer>72",
        "<think><answer>72</answer>",
        "<answer>72</answer><answer>72</answer>",
        "I tried 72",
        "<answer>72</answer></think>",
        "72",
        "\\boxed{72}",
        "<answer>73</answer> \\boxed{72}",
    ]
    right = ["<answer>72</answer>", "<answer>\\boxed{72}</answer>", "<answer>The answer is 72.</answer>"]
    right.append("<answer>72</answer> \\boxed{73}")
    assert misjudged("openr1mm", {"<answer>72</answer>": (right, wrong)}) == []
