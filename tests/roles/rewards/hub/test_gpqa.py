"""gpqa: written answers with the verdict of a careful person."""

from __future__ import annotations

from tests.roles.rewards.hub.judging import Table, misjudged, score_of, size

STARS = {"choices": ["a red giant", "the white dwarf", "the neutron star", "a black hole"]}
NUMBERS = {"choices": ["5 m", "15 m", "1.5 m", "50 m"]}
ANSWERS: Table = {
    "C": (
        (
            "C", "(C)", "C.", "**C**", "Answer: C", "**Answer:** C", "**Answer: C**", "Answer: (C)", "Answer: $C$",
            "Answer: \\text{C}",
            "Answer: \\boxed{C}", "The answer is \\boxed{C}.", "\\boxed{\\text{C}}", "\\boxed{(C)}",
            "$\\boxed{\\mathrm{C}}$", "answer: c",
            "The answer is C", "The correct answer is (C) the neutron star.", "The answer is clearly C.",
            "Option C is correct.",
            "C is the correct answer.", "I choose C.", "So it's C.", "Therefore, C.", "The correct option is C",
            "It must be (C).",
            "Option A is wrong. Answer: C", "The answer is a bit subtle. Answer: C",
            "Answer: B\n\nWait, that ignores spin.\nAnswer: C",
            "Answer: C. Option A is wrong since light bends.", "A is too large. B is too small. D is absurd.\n\nAnswer: C",
            "(A) no\n(B) no\n(C) yes\n(D) no\n\nThe answer is C", "It is the neutron star.", "The answer is the neutron star.",
            "not the white dwarf, but the neutron star", "the neutron star, not the white dwarf",
            "The white dwarf is wrong; the answer is the neutron star", "It isn't A, it's C",
            "Final Answer: C) the neutron star",
            "I considered B. The correct choice is C.", "Answer: option C", "C) the neutron star", "<answer>C</answer>",
            "The answer isn't B. The answer is C.", "## Answer\n\n**C**", "Answer:\nC", "Answer: C, because B would cool.",
            "ANSWER: C", "The final answer is: $\\boxed{C}$", "Answer: [C]", "It is not a black hole. Answer: C",
        ),
        (
            "A", "Answer: A", "Answer: B", "Answer: D", "Answer: Z", "", "Answer:", "B and C", "B or C", "Answer: B or C",
            "Answer: C or B", "Answer: C, D", "Answer: B/C", "C and D", "A, B, C, D", "The answer is either C or D.",
            "not the neutron star, but the white dwarf", "the white dwarf or the neutron star",
            "a red giant, the white dwarf, the neutron star, a black hole", "It is not the neutron star.",
            "The answer is not C.",
            "C is wrong.", "Option C is incorrect. Answer: A", "Answer: C\nNo, that is wrong.\nAnswer: B", "It isn't C, it's B",
            "Option C is wrong, so the answer is D", "I don't know.", "A\nB\nC\nD", "(A) (B) (C) (D)",
            "The answer is a bit subtle.",
            "Carbon", "Answer: Carbon", "neither B nor C", "a star", "the answer is the white dwarf", "\\boxed{B}",
            "\\boxed{B \\text{ or } C}",
            "\\boxed{C} or \\boxed{D}", "(C) is incorrect, (D) is correct", "Answer: not C", "C is not the answer. B is.",
            "<answer>C</answer><answer>B</answer>", "Everything but C",
        ),
    ),
    "A": (
        ("A", "Answer: A", "(A)", "A. a red giant", "It is a red giant.", "Option A is right."),
        (
            "A neutron star.", "A white dwarf is small.", "The answer is a black hole.", "A good question. Answer: D",
            "The answer is a neutron star.", "A hard one", "The answer is the neutron star.",
        ),
    ),
    2: (("Answer: C", "the neutron star"), ("Answer: B", "Answer: D")),
    "the neutron star": (("Answer: C", "the neutron star", "It's the neutron star."), ("Answer: A", "a black hole")),
}  # fmt: skip
FURTHER: Table = {
    "C": (
        (
            "Answer: C\n\nBut B and D are also plausible.", "I think the answer is C, although B is tempting",
            "**C**. Because it spins.",
            "The best choice is **(C)**", "Answer: the neutron star (C)", "Answer: neutron star",
            "The answer cannot be A or B. So C.",
            "The answer is\n\n**(C) the neutron star**", "Answer: C and not B", "Answer: A is wrong, C is right",
            "Answer: A. Answer: B. Answer: C.",
            "It could be a red giant or a black hole, but it is the neutron star.",
            "The neutron star rather than the white dwarf", "Choice C",
            "The answer is C, D is wrong", "Answer: C. It is a neutron star, not A.",
            "Answer: C\n\nIt is because a red giant would expand.",
            "Answer: C. Therefore A, B and D are wrong.", "Answer: C\nI would not choose B.", "Answer: <C>", "Answer: 'C'",
            "Answer: C!",
            "\\boxed{\\text{C. the neutron star}}", "\\boxed{the neutron star}", "Not sure, but it's C.", "答案：C",
            "The answer is not A but C", "A: wrong\nB: wrong\nC: correct\nD: wrong",
            "Option A: incorrect.\nOption B: incorrect.\nOption C: correct.\nOption D: incorrect.", "C seems right",
            "答案是C。", "答案为C",
            "Rule out A. The answer is C.", "Answer: C. No other choice fits.", "Answer: C, a black hole would evaporate.",
            "Answer: A\nWait, no.\nAnswer: C", "(A) wrong (B) wrong (C) right (D) wrong", "Answer: B? No. Answer: C",
        ),
        (
            "Answer: B, not C", "A and C are both right", "Answer: A, B, C or D", "Answer: ABCD", "Answer: (C)(D)",
            "Answer: C D", "\\boxed{A, C}",
            "Answer: C or D, I can't decide", "I don't think it's the neutron star", "I don't think the answer is C",
            "the neutron star is incorrect",
            "Both the white dwarf and the neutron star", "The answer is C; D", "Answer: C + D",
            "The correct answers are B and C",
            "Don't choose C. Choose B.", "The wrong answer is C", "Wrong answer: C. Right answer: B",
            "I am torn between C and D",
            "Answer: C or D because both are dense", "If the answer is C, then light escapes. It can't. The answer is D",
            "Final answer: C? No: D", "The answer is C, or possibly D.", "Answer: C. Or D.", "Answer: C as well as D",
            "Answer: C is possible, D too", "Answer: C?", "The answer can't be C", "The answer cannot be C", "cannot be C",
            "The answer is no longer C", "Answer: C false", "Option C: incorrect", "Rule out C.", "I ruled out option C.",
            "C: no",
            "Answer: C\n\nWait, actually B.", "Answer: C\nCorrection: B", "Answer: C. No, D.", "Answer: C. Sorry, I meant D.",
            "Answer: B neutron star", "Answer: B. The neutron star", "C: wrong", "Answer: C\n\nThat's wrong.", "Answer: C ✗",
            "Is it C?", "Answer: C, alternatively D",
        ),
    ),
}  # fmt: skip
LENGTHS: Table = {
    "A": (("5 m", "The answer is 5 m.", "Answer: A", "It is 5 m, not 15 m"), ("15 m", "1.5 m", "50 m", "It is 15 m.",
        "5 m or 15 m")),
    "B": (("15 m", "It is 15 m."), ("5 m", "1.5 m")),
}  # fmt: skip


def test_written_answers_are_judged_as_by_a_careful_person() -> None:
    assert size(ANSWERS) >= 40
    assert misjudged("gpqa", ANSWERS, metadata=STARS) == []
    assert misjudged("gpqa", FURTHER, metadata=STARS) == []
    assert misjudged("gpqa", LENGTHS, metadata=NUMBERS) == []


def test_without_choices_a_letter_or_the_text_of_the_label_counts() -> None:
    table: Table = {
        "B": (("The answer is (B)", "B"), ("C", "B or C")),
        "neutron star": (("It is a neutron star.",), ("It is not a neutron star.",)),
    }
    assert misjudged("gpqa", table) == []


def test_as_published_the_first_mention_counts() -> None:
    theirs = {"Option A is wrong. Answer: C": 0, "The answer is clearly C": 1, "B and C": 1, "C. Answer: B": 0}
    assert {said: score_of("gpqa", said, "C", STARS, as_published=True) for said in theirs} == theirs
