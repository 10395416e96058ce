"""Advantages: from the rewards of one prompt group to one number a sample, or one a token.

Owns the formulas by name, of which an algorithm's record names one or the user's own, and how they reach tokens. numpy only:
the role that runs them needs no torch.

    group_mean_std(np.array([1, 0, 0, 1], np.float32), masks) -> [0.866, -0.866, -0.866, 0.866]

Invariant: the result depends on this prompt group alone; that of ours sums to 0, and equal rewards give 0 for every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rondo.roles.algorithms.algorithm import Advantage
from rondo.runtime.errors import Fatal

AdvantageFunction = Callable[[np.ndarray, Sequence[np.ndarray]], np.ndarray]
"""(rewards float32 [n] of the samples of one prompt group that have one, masks: for each uint8 [R], 1 = its R tokens that train)
-> advantages float32 [n], or one a token: those of all samples behind each other, [sum of R]."""

EPSILON = 1e-6
"""Added to the standard deviation, so that equal rewards give 0 and not 0 / 0."""


def group_mean(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = r_i - mean(r): Dr.GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2)."""
    values = rewards.astype(np.float64)
    return (values - values.mean()).astype(np.float32)


def group_mean_std(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the unbiased standard deviation.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). A group of one sample has no deviation and gets 0.
    """
    values = rewards.astype(np.float64)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return ((values - values.mean()) / (deviation + EPSILON)).astype(np.float32)


ADVANTAGES: Mapping[Advantage, AdvantageFunction] = {"group_mean": group_mean, "group_mean_std": group_mean_std}


def of_tokens(compute: AdvantageFunction, rewards: Sequence[float], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What `compute` gives some samples of a group: float32 [R] for each, 0 on tokens that do not train. Fatal for another shape,
    and for what is not finite."""
    lengths = [len(mask) for mask in masks]
    found = np.asarray(compute(np.array(rewards, np.float32), masks), np.float32)
    if found.shape not in ((len(masks),), (sum(lengths),)) or not np.isfinite(found).all():
        got = f"shape {list(found.shape)}" if np.isfinite(found).all() else f"{found[~np.isfinite(found)].flat[0]}"
        raise Fatal(
            f"algorithm.advantage must return one finite number for each of {len(masks)} samples, or for each of their "
            f"{sum(lengths)} tokens, got {got}. Correct it"
        )
    parts = found if len(found) == len(masks) else np.split(found, np.cumsum(lengths)[:-1])
    return [mask.astype(np.float32) * part for mask, part in zip(masks, parts, strict=True)]
