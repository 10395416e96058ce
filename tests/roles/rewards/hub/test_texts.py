"""exact, boxed and f1: written answers with the verdict of a careful person."""

from __future__ import annotations

import pytest

from tests.roles.rewards.hub.judging import Table, misjudged, score_of, size

EXACT: Table = {
    "72": (
        ("72", " 72", "72 ", "72\n", "\n72\n", "\t72"),
        (
            "73", "", " ", "7 2", "72.", "72.0", "it is 72", "72 or 73", "72, 73", "-72", "−72", "072", "**72**",
            "\\boxed{72}", "$72$",
            "72%", "72e0", "７２", "<think>72", "<think>72</think>", "72</think>", "seventy-two", "72\n72", "72!", "“72”", "None",
        ),
    ),
    72: (("72",), ("73",)),
    "Paris": (("Paris", " Paris ", "<think>Rome?</think>Paris"), ("paris", "Paris.", "Rome", "Paris or Rome", "not Paris",
        "The answer is Paris")),
    "a  b": (("a  b",), ("a b", "ab")),
    ("yes", "no"): (("yes", "no"), ("maybe", "yes no", "('yes', 'no')")),
    "None": (("None",), ("none", "")),
}  # fmt: skip
BOXED: Table = {
    "72": (
        ("72", " 72 ", "$72$", "\\text{72}", "\\mathrm{72}", "72.", "**72**", "\\,72", "\\displaystyle 72", "\\boxed{72}"),
        (
            "73", "", "-72", "72 or 73", "72, 73", "72/2", "72-80", "72e3", "0,72", "1 = 72", "72x", "not 72", "172", "72^2",
            "\\text{not }72",
            "72.5", "\\frac{144}{2}", "72 apples", "(72)", "72 \\text{ and } 73",
        ),
    ),
    "\\frac{1}{2}": (("\\frac{1}{2}", "\\dfrac{1}{2}", "\\tfrac{1}{2}", "\\frac{ 1 }{ 2 }", "\\frac 12", "\\frac12", "1/2"),
        ("0.5", "\\frac{2}{1}")),
    "-3": (("-3", "−3", "- 3"), ("3", "–")),
    "(1, 2)": (("(1,2)", "\\left(1, 2\\right)"), ("(2,1)", "1,2", "\\{1,2\\}")),
    "two cats": (("two cats", "\\text{two cats}"), ("two dogs", "cats")),
    "C": (("C", "\\text{C}", "\\textbf{C}"), ("c", "A", "B and C", "CC")),
}  # fmt: skip
BOXED_WHOLE: Table = {
    "72": (
        ("So \\boxed{72}.", "\\fbox{72}", "\\boxed {72}", "\\boxed{71} no, wait. \\boxed{72}", "$\\boxed{72}$"),
        ("72", "\\boxed{72", "\\boxed{72} or \\boxed{73}", "\\boxed{73} or \\boxed{72}", "\\boxed{72} \\boxed{73",
            "\\boxed{72} so \\boxed{73}"),
    ),
    "1,2": (("\\boxed{1}, \\boxed{2}", "$\\boxed{1}$ and $\\boxed{2}$"), ("\\boxed{2}",)),
}  # fmt: skip
F1: list[tuple[str, str, float]] = [
    ("cat", "cat", 1), ("Cat!", "the cat", 1), ("the cat", "cat", 1), ("a an the cat", "cat", 1), ("", "cat", 0), ("dog",
        "cat", 0),
    ("the cat sat", "a cat", 2 / 3), ("cat sat", "cat", 2 / 3), ("cat cat", "cat", 2 / 3), ("cat", "cat cat", 2 / 3), ("CAT",
        "cat", 1),
    ("cat.", "cat", 1), ("'cat'", "cat", 1), ("cat dog", "dog cat", 1), ("Denver Broncos won", "Denver Broncos", 0.8),
        ("yes", "yes", 1),
    ("yes", "no", 0), ("Yes.", "yes", 1), ("yes it is", "yes", 0), ("no", "no way", 0), ("noanswer", "noanswer", 1),
        ("noanswer", "cat", 0),
    ("1998", "1998", 1), ("in 1998", "1998", 2 / 3), ("19 98", "1998", 0), ("1,998", "1998", 1), ("U.S.", "US", 1), ("us",
        "U.S.", 1),
    ("New York City", "New York", 0.8), ("York", "New York", 2 / 3), ("x y z w", "x", 0.4), ("<think>cat", "cat", 0),
    ("<think>dog</think>cat", "cat", 1), ("dog</think>cat", "cat", 1), ("<think>cat</think>", "cat", 0), ("cat\ncat dog",
        "cat dog", 0.8),
    ("not the cat", "cat", 2 / 3), ("well-known", "wellknown", 1), ("café", "café", 1), ("theater", "the ater", 0), ("a",
        "b", 0),
]  # fmt: skip


def test_exact_wants_the_label_and_nothing_else() -> None:
    assert size(EXACT) >= 40
    assert misjudged("exact", EXACT) == []
    assert (
        misjudged("exact", {"72": (["<answer> 72 </answer>"], ["72", "<answer>72", "72</answer>"])}, inside="answer")
        == []
    )


def test_boxed_compares_texts() -> None:
    assert size(BOXED, BOXED_WHOLE) >= 40
    assert misjudged("boxed", BOXED, "It is $\\boxed{{}}$.") == []
    assert misjudged("boxed", BOXED_WHOLE) == []


@pytest.mark.parametrize(("answer", "label", "score"), F1)
def test_f1_is_squads(answer: str, label: str, score: float) -> None:
    assert score_of("f1", answer, label) == pytest.approx(score)
