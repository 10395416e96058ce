"""dapo: written answers with the verdict of a careful person."""

from __future__ import annotations

from tests.roles.rewards.hub.judging import HEDGED, NAMED, Table, misjudged, score_of, size

ANSWERS: Table = {
    "72": (
        (
            "72", "$72$", "$72$.", "72.", "\\boxed{72}", "$\\boxed{72}$", "$\\boxed{72}$.", "**72**", "** 72", "72 dollars",
            "72 km", "\\$72",
            "72^\\circ", "72 degrees", "x = 72", "$x = 72$", "6 \\cdot 12 = 72", "72.0", "72 \\text{ cm}", "72%",
            "71\nAnswer: 72", "(72)",
            "$72$ units", "\\text{72}", "72<|im_end|>", " 72 ", "72\n\nThat is all.", "+72", "144/2", "72!", "\\(72\\)",
        ),
        (
            "73", "", "-72", "−72", "72 or 73", "$72$ or $73$", "72, 73", "7,2", "7 2", "7 ways 2", "72/2", "72e3", "72-80",
            "0,72", "1 = 72",
            "not 72", "72\nAnswer: 73", "72,000", "72^2", "72! * 2", "$72$ is wrong", "$72$ to $80$", "(72, 73)",
            "\\{72\\} or 73", "72x", "172",
            "72 and 73", "72 \\cdot 2", "72:1", "?",
        ),
    ),
    "34.0": (("34", "$34$", "34.0"), ("3.4", "340")),
    "-3": (("-3", "−3", "$-3$"), ("3", "5-3")),
    "1234": (("1,234", "1234", "1{,}234", "1\\,234", "x = 1,234 dollars"), ("12,34", "1, 234", "1.234")),
    "\\frac{1}{2}": (("\\frac{1}{2}", "$\\frac12$", "\\dfrac{1}{2}", "1/2", "0.5"), ("2", "\\frac{2}{1}",
        "\\frac{1}{2} \\text{ or } 1")),
    "2\\sqrt{3}": (("2\\sqrt{3}", "$2\\sqrt3$", "2 \\sqrt{3}"), ("3\\sqrt{2}", "2", "2\\sqrt{3} or 1")),
    "(1, 2)": (("(1, 2)", "(1,2)", "$(1,2)$"), ("(2, 1)", "12", "1, 2")),
    "\\pi": (("\\pi", "x = \\pi", "\\pi = \\pi"), ("2\\pi = \\pi", "2 = \\pi", "x^2 = \\pi")),
    "B": (("B", "\\text{B}", "**B**"), ("A", "A or B", "B or C")),
    5: (("5",), ("0,5", "6")),
}  # fmt: skip
WHOLE: Table = {
    "9": (
        ("Step by step.\nAnswer: 9", "**Answer:** 9", "**Answer: 9**", "answer : 9", "Answer:\n9",
            "Answer: 9\n" + "So it goes. " * 60),
        ("9", "The answer is 9", "\\boxed{9}", "<think>Answer: 9", "<think>Answer: 9</think>", "Answer: 9</think>",
            "Answer: 7" + "." * 300, "Answer: 9\n\nWait, no, it is 10.", "Answer: 9\nNo, 10.", "Answer: 9\n\nThat is wrong.",
            "Wrong answer: 9", "Incorrect answer: 9", "Answer: \\boxed{9"),
    )
}  # fmt: skip


def test_written_answers_are_judged_as_by_a_careful_person() -> None:
    assert size(ANSWERS) >= 40
    assert misjudged("dapo", ANSWERS, "So.\nAnswer: {}") == []
    assert misjudged("dapo", WHOLE) == []
    assert misjudged("dapo", {"72": (NAMED, HEDGED)}, "Answer: {}") == []


def test_as_published_minervas_form_is_compared() -> None:
    theirs = {
        "Answer: 7,2": 1,
        "Answer: $72$ or $73$": 1,
        "Answer: 7 ways 2": 1,
        "Answer: 1 = 72": 1,
        "**Answer:** 72": 0,
        "Answer: 72.0": 0,
    }
    assert {said: score_of("dapo", said, "72", as_published=True) for said in theirs} == theirs
