"""Tables of written answers: by label those that a careful person calls right, and those that they call wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rondo.roles.rewards import hub

Table = Mapping[Any, tuple[Sequence[str], Sequence[str]]]
"""Label -> (right, wrong)."""


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
