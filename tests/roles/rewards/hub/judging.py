"""Tables of written answers: by label those that a careful person calls right, and those that they call wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rondo.roles.rewards import hub

Table = Mapping[Any, tuple[Sequence[str], Sequence[str]]]
"""Label -> (right, wrong)."""


HEDGED = (
    "72 or more", "72 and up", "72 or less", "72 or seventy-three", "72 or fewer", "72 and above", "cannot be 72", "¬72",
    "72 false", "72 no", "72 ✗", "72 dozen", "72 hundredths", "72 lakh", "72 crore", "72 bn", "72 mln", "72万", "72. No, wait.",
    "72 hundreds", "72 tenths", "2+2=72", "3-2=72", "50% of 200 = 72", "2x=72", "x^2=72", "-x=72", "x+1=72", "\\frac{x}{2}=72",
    "\\sqrt{100}=72", "2\\pi = 72", "\\neq 72", "\\geq 72", "72_8",
)  # fmt: skip
"""Wrong for 72, however they are marked: hedges, denials, scales, and equations whose left side has another value."""
NAMED = ("x = 72", "f(2) = 72", "m + n = 72", "Total = 72", "\\text{Area} = 72", "50% of 144 = 72", "8 \\cdot 9 = 72",
        "6 x 12 = 72",
    "48 clips + 24 clips = 72 clips", "x_1 = 72", "2^3 * 9 = 72", "x = 6 \\cdot 12 = 72", "72</s>")  # fmt: skip
"""Right for 72: a name, or arithmetic of the same value, in front of it."""


def score_of(name: str, response: str, label: Any, metadata: Any = None, **args: Any) -> float:
    """Return 1 for an answer that is right as a whole."""
    value = getattr(hub, name)(response, label, prompt="6 * 12", metadata=metadata or {}, **args)
    value = value.get("accuracy", value["score"]) if isinstance(value, dict) else value
    return float(value)


def misjudged(name: str, table: Table, form: str = "{}", metadata: Any = None, **args: Any) -> list[tuple[Any, str]]:
    """Return (label, answer) of those that the reward judges otherwise. `form`: how the reward's answers are written."""
    return [
        (label, answer)
        for label, sides in table.items()
        for right, answers in zip((True, False), sides, strict=True)
        for answer in answers
        if (score_of(name, form.replace("{}", answer), label, metadata, **args) == 1) != right
    ]


def size(*tables: Table) -> int:
    """Return the number of answers in the tables."""
    return sum(len(side) for table in tables for sides in table.values() for side in sides)
