"""Means: what samples were worth since it was last asked, and what each component of their rewards was.

means.add(1.5, {"format": 1.0, "correct": 0.5}); means.take()    ->   {"mean": 1.5, "num_samples": 1, "components": {...}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class RewardMeans:
    """Of samples whose reward did not fail. names: of the components, which stand in the details by these."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._begin()

    def _begin(self) -> None:
        self._num, self._total = 0, 0.0
        self._sums: dict[str, tuple[int, float]] = {}

    def add(self, score: float, details: Mapping[str, Any]) -> None:
        self._num, self._total = self._num + 1, self._total + score
        for name in self._names:
            if isinstance(value := details.get(name), int | float):  # of several functions a row may have one
                num, total = self._sums.get(name, (0, 0.0))
                self._sums[name] = num + 1, total + value

    def take(self) -> dict[str, Any]:
        """As a part of a record, and begins anew; nothing without samples."""
        if not self._num:
            return {}
        told = {"mean": self._total / self._num, "num_samples": self._num}
        parts = {name: total / num for name, (num, total) in self._sums.items()}
        self._begin()
        return {"rewards": told | ({"components": parts} if parts else {})}
