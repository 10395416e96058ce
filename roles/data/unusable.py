"""Unusable rows: how many of them a data set may lose before it is refused, and the words for that.

Owns the count of errors by reason. Does not own what makes a row unusable (`datasets.py`, `prompts.py`), nor rows that a setting
leaves out on purpose: those that a filter refuses, or that are too long.

    unusable = UnusableRows()
    unusable.add("a.jsonl:7: 'info' must be an object or null, got int. Correct the row")
    unusable.refusal("data", "data.max_bad_rows", 0.01, 40)   ->   "data must have at most 1 % unusable rows, got 2.5 % ..."
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUM_REASONS = 3
_NAME = re.compile(r"^.*?(?:: (?=\S)|(?= must ))")
"""Of the row, at the beginning of its error."""


class UnusableRows:
    """Errors of rows, counted by what they have in common; of each reason the first error."""

    def __init__(self) -> None:
        self._reasons: dict[str, tuple[int, str]] = {}

    def __len__(self) -> int:
        return sum(count for count, _ in self._reasons.values())

    @property
    def first(self) -> str:
        """The first error."""
        return next((error for _, error in self._reasons.values()), "")

    def add(self, error: str) -> None:
        """Count the error of one row, which begins with the row's name."""
        reason = re.sub(r"\d+", "0", _NAME.sub("", error, count=1).partition(", got ")[0])
        count, first = self._reasons.get(reason, (0, error))
        self._reasons[reason] = (count + 1, first)

    def refusal(self, name: str, setting: str, most: float, num_rows: int, where: str = "rows") -> str | None:
        """Return why the data set is refused if more of `num_rows` are unusable than the share `most`, which `setting` allows;
        else None. where: what these rows are."""
        if len(self) <= Fraction(str(most)) * num_rows:  # as it is written: 0.29 * 100 is less than 29
            return None
        frequent = sorted(self._reasons.values(), key=lambda reason: -reason[0])[:_NUM_REASONS]
        shown = "; ".join(f"{count} as in {first.rstrip('.')!r}" for count, first in frequent)
        return (
            f"{name} must have at most {100 * most:g} % unusable rows, got {100 * len(self) / num_rows:.3g} % of {num_rows} "
            f"{where}: {shown}. Correct the rows, or raise {setting} to have them left out"
        )
