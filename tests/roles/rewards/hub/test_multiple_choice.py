"""multiple_choice: written answers with the verdict of a careful person."""

from __future__ import annotations

from tests.roles.rewards.hub.judging import Table, misjudged, score_of, size

ANSWERS: Table = {
    "C": (
        (
            "C", " C ", "\nC\n", "(C)", "C.", "C)", "[C]", "c", "(c)", "**C**", "*C*", "$C$", "\\boxed{C}", "\\text{C}",
            "$\\text{C}$",
            "\\boxed{\\text{C}}", "\\boxed{(C)}", "C. Paris", "C) Paris", "C: Paris", "(C) Paris", "**C. Paris**", "Option C",
            "option C.", "Choice C", "Answer: C", "**Answer:** C", "The answer is C", "The answer is (C).",
            "The correct option is C.",
            "The answer is C because Paris is a city.", "Option A is wrong. Answer: C", "The answer is a bit subtle. Answer: C",
            "Not A but C", "It's C", "C is correct", "`C`", "C - Paris", "Final answer: C", "\\mathrm{C}", "Ｃ",
        ),
        (
            "A", "B", "D", "", " ", "A or C", "C or A", "B and C", "C and B", "A, C", "C, A", "A/C", "C/A", "AC", "CA",
            "A B C D",
            "A. Rome B. Oslo C. Paris D. Bern", "not C", "Not C.", "anything but C", "C is wrong", "C is not correct",
            "The answer is not C",
            "Answer: A", "Cat", "CC", "C. No wait, B.", "Answer: C\nAnswer: B", "neither A nor C", "?", "C or maybe D",
            "\\boxed{A}", "A. C", "A. See C", "It's A, not C", "Option C is wrong. Answer: B", "B (C is wrong)", "C?",
            "Answer: C?", "C. Or D.", "cannot be C", "C. No, D.",
        ),
    ),
    "A": (("A", "a", "(a)", "A. Rome"), ("A cat", "A or B", "a dog", "B", "Answer: a bit unclear")),
    "(B)": (("B", "(B)", "b)"), ("A", "(C)")),
    "B. Paris": (("B", "B. Paris", "(B) Paris"), ("A. Paris", "C")),
    "<answer>B</answer>": (("B", "(B)"), ("C",)),
    "red car": (("red car", " red car ", "Red car", "**red car**", "red car."), ("blue car", "red car or blue car", "car",
        "not red car")),
    "yes": (("yes", "Yes", "Yes."), ("no", "yes and no", "not yes")),
    "12": (("12", "$12$", "\\boxed{12}"), ("13", "12 or 13", "1 2", "-12")),
}  # fmt: skip
WHOLE: Table = {
    "C": (
        ("<answer>C</answer>", "So.\n<answer>\nC\n</answer>\n", "<answer>A</answer> no, <answer>C</answer>",
            "x</think><answer>C</answer>"),
        ("C", "<answer>C", "C</answer>", "<answer>C</answer> no, <answer>A</answer>", "<think><answer>C</answer>",
            "<answer></answer>"),
    )
}  # fmt: skip


def test_written_answers_are_judged_as_by_a_careful_person() -> None:
    assert size(ANSWERS) >= 40
    assert misjudged("multiple_choice", ANSWERS, "<answer>{}</answer>") == []
    assert misjudged("multiple_choice", ANSWERS, inside=None) == []
    assert misjudged("multiple_choice", ANSWERS, "So \\boxed{{}}", inside="boxed") == []
    assert misjudged("multiple_choice", WHOLE) == []


def test_as_published_the_first_answer_counts_as_text() -> None:
    theirs = {
        "<answer>A</answer><answer>C</answer>": 0,
        "<answer>C</answer><answer>A</answer>": 1,
        "<answer>C. x</answer>": 0,
    }
    assert {said: score_of("multiple_choice", said, "C", as_published=True) for said in theirs} == theirs
