"""gsm8k: written answers with the verdict of a careful person."""

from __future__ import annotations

from tests.roles.rewards.hub.judging import Table, misjudged, score_of, size

MARKED: Table = {
    "72": (
        (
            "She sold 48 in April and 24 in May, 48 + 24 = 72.\n#### 72", "####72", "####   72", "#### 72.", "#### 72.0",
            "#### 72.00", "#### **72**", "**#### 72**", "#### $72", "#### \\$72", "#### $72$", "#### \\boxed{72}",
            "#### $\\boxed{72}$", "#### 72 apples", "#### 72 dollars", "#### $72.00", "#### 72%", "#### 72 \\%", "#### 72 km/h",
            "#### 72 cm^2", "#### 72 m²", "#### 72km", "#### x = 72", "#### 6 * 12 = 72", "#### The answer is 72.",
            "#### Answer: 72", "#### 71\n#### 72", "#### Final Answer\n72", "#### Final answer:\n\n**72**", "#### 72 ####",
            "#### \\text{72}", "#### 72 \\text{ apples}", "#### 72 apples per day", "#### $72 per month", "#### +72",
            "#### 72<|im_end|>", "#### 72 € ", "#### 72\n", "### Step 1\n6 * 12\n#### 72", "#### \\(72\\)", "#### 144/2",
            "#### Step 1: add 48\n\n#### 72",
        ),
        (
            "72", "The answer is 72", "#### 72 or 73", "#### 73 or 72", "#### 72 and 73", "#### 72, 73", "#### 72,73",
            "#### 72/2", "#### 1/72", "#### 72e3", "#### 72-80", "#### 72 - 80", "#### 72–80", "#### 72 to 80", "#### 72..80",
            "#### 72,000", "#### 72 000", "#### 72k", "#### 72 million", "#### 72 thousand", "#### not 72", "#### -72",
            "#### −72", "#### 72^2", "#### 72²", "#### 72!", "#### 72 * 2", "#### 72 + 1", "#### 72:30", "#### 7 2", "#### 7,2",
            "#### 0,72", "#### 72.5", "#### 72 1/2", "#### 72\n#### 71", "#### 720", "#### 172", "#### ", "####", "#### x72y",
            "#### 1 or 2 or 72", "#### between 70 and 72", "#### less than 72", "#### more than 72", "#### seventy",
            "#### 72 = 73", "#### It isn't 72", "#### 72 x", "#### 71 72 73", "#### 72?73", "#### 0x72", "#### 7.2",
            "#### 72 hundred",
            "#### \\boxed{72} or \\boxed{73}", "#### 72 is wrong", "#### 72\\cdot 2", "#### \\sqrt{72}", "#### 72 ± 1",
            "#### 70 < 72", "#### 72\n\nOn reflection:\n#### 73",
        ),
    ),
    "5": (("#### 5", "#### 5.0", "#### 10/2"), ("#### 0,5", "#### 0.5", "#### .5", "#### 05,0", "#### 5,0", "#### 5,5",
        "#### 1,5")),
    "0.5": (("#### 0.5", "#### .5", "#### 1/2", "#### \\frac{1}{2}", "#### \\frac12", "#### 0.50"), ("#### 5", "#### 0,5",
        "#### 2/1")),
    "1234": (
        ("#### 1,234", "#### 1234", "#### 1 234", "#### 1\\,234", "#### 1{,}234", "#### $1,234.00", "#### 1.234e3",
            "#### 1,234 miles"),
        ("#### 1,23,4", "#### 12,34", "#### 1.234", "#### 1, 234", "#### 1234,567", "#### 1.234,00"),
    ),
    "-3": (("#### -3", "#### −3", "#### -3.0", "#### - 3", "#### -$3", "#### $-3", "#### –3"), ("#### 3", "#### 2-3",
        "#### 5 - 3", "#### 3-")),
    "2.5": (("#### 2.5", "#### 5/2", "#### 2 1/2", "#### 2\\frac{1}{2}", "#### $2.50"), ("#### 2,5", "#### 25", "#### 2.5.1",
        "#### 21/2")),
    "Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72": (("#### 72",), ("#### 48",)),
    72: (("#### 72",), ("#### 73",)),
    "$1,000": (("#### 1000", "#### $1,000"), ("#### 1",)),
}  # fmt: skip
ANYWHERE: Table = {
    "72": (
        (
            "72", "The answer is 72", "So she has 6 * 12 = 72 clips.", "She has **72** clips.", "6 * 12 = 72", "It costs $72.",
            "Half of 144 is 72.", "She needs 3 days.\nSo the total is 72.", "\\boxed{72}", "So the answer is $\\boxed{72}$.",
            "I first thought of 71. The answer is 72.", "**Answer:** 72", "First 48, then 24, so 72 in all.", "#### 72",
        ),
        (
            "73", "none", "", "The answer is 72 or 73.", "The answer is 73 or 72.", "It is 72-80.", "It is 72/2.",
            "It is 72e3.",
            "It is between 70 and 72.", "It is −72.", "It is 72,5.", "72 of 100", "It is 72%; no, 71%.", "71 72 73",
            "72. No, 71.",
        ),
    ),
    "-3": (("It is −3.", "It is -3 degrees."), ("It is 3.", "It is 5-3.")),
}  # fmt: skip


def test_written_answers_are_judged_as_by_a_careful_person() -> None:
    assert size(MARKED) >= 40
    assert misjudged("gsm8k", MARKED) == []
    assert misjudged("gsm8k", ANYWHERE, anywhere=True) == []


def test_as_published_the_readers_of_verl_score() -> None:
    strict = {
        "#### 72 or 73": 1,
        "#### 72/2": 1,
        "#### 72.0": 0,
        "#### **72**": 0,
        "#### 71\n#### 72": 1,
        "<think>#### 72": 1,
        "72": 0,
    }
    assert {said: score_of("gsm8k", said, "72", as_published=True) for said in strict} == strict
    flexible = {"72 or 73": 0, "73 or 72": 1, "72.": 0, "72": 1}
    found = {said: score_of("gsm8k", said, "72", as_published=True, anywhere=True) for said in flexible}
    assert found == flexible
