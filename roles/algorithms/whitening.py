"""Whitening: the advantages of a whole step brought to mean 0 and deviation 1.

Owns the formula, and what each sample contributes to it. Does not own where advantages come from (`advantages.py`), nor how
contributions reach every rank (`roles/actor.py`).

    parts = [contribution(row.advantages, row.mask, "tokens") for row in every_row_of_the_step]
    Whitening.of(parts).apply(row.advantages, row.mask)

Invariant: sums are exact (`math.fsum`), so the result depends on the samples of the step alone, not on their order or on the
ranks that hold them. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rondo.roles.algorithms.algorithm import BatchNormalization

FLOOR = 1e-8
"""Added to the variance, so that equal advantages give 0 and not 0 / 0."""

Contribution = tuple[float, float, float]
"""How many values, their sum, the sum of their squares."""


def contribution(advantages: np.ndarray, mask: np.ndarray, over: BatchNormalization) -> Contribution:
    """What one sample, float32 [R] each, adds to the statistics: "tokens": each unmasked token; "samples": their mean, once.

    A sample without unmasked tokens adds nothing.
    """
    values = advantages[mask > 0].astype(np.float64).tolist()
    if values and over == "samples":
        values = [math.fsum(values) / len(values)]
    return float(len(values)), math.fsum(values), math.fsum([value * value for value in values])


@dataclass(frozen=True, slots=True)
class Whitening:
    """The statistics of a step: population mean and deviation, as in REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, parts: Sequence[Sequence[float]]) -> Whitening:
        """From the contributions of all samples of a step, in any order."""
        count, total, squares = (math.fsum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0, 0.0)
        count = max(1.0, count)
        mean = total / count
        return cls(mean, math.sqrt(max(0.0, squares / count - mean * mean)))

    def apply(self, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """(A - mean) / sqrt(deviation^2 + 1e-8) at unmasked tokens, 0 elsewhere; float32 [R]."""
        scaled = (advantages.astype(np.float64) - self.mean) / math.sqrt(self.deviation**2 + FLOOR)
        return np.where(mask > 0, scaled, 0.0).astype(np.float32)
