"""Advantages: from the rewards of one prompt group to one number a sample.

Owns the formulas by name; an algorithm's record names one. Does not own how they reach tokens (`advantages.py`
broadcasts them over the loss mask). numpy only: the role that runs them needs no torch.

    ADVANTAGES["group_mean_std"](np.array([1, 0, 0, 1], np.float32)) -> [0.866, -0.866, -0.866, 0.866]

Invariant: the result depends on this prompt group alone and sums to 0; equal rewards give 0 for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rondo.roles.algorithms.algorithm import Advantage

AdvantageFunction = Callable[[np.ndarray], np.ndarray]
"""rewards float32 [n] of one prompt group -> advantages float32 [n]."""

EPSILON = 1e-6
"""Added to the standard deviation, so that equal rewards give 0 and not 0 / 0."""


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r): Dr.GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2)."""
    values = rewards.astype(np.float64)
    return (values - values.mean()).astype(np.float32)


def group_mean_std(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the unbiased standard deviation.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). A group of one sample has no deviation and gets 0.
    """
    values = rewards.astype(np.float64)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return ((values - values.mean()) / (deviation + EPSILON)).astype(np.float32)


ADVANTAGES: Mapping[Advantage, AdvantageFunction] = {"group_mean": group_mean, "group_mean_std": group_mean_std}
