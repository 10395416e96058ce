"""Drift: how far the policy has moved from the one that sampled, over all tokens of a step, before its first gradient.

Owns the two statistics that losses are made with: the second moment of M2PO and the effective sample size of P3O. Does not own
where the log-ratios come from (`training/objective.py`), nor the losses (`policy_losses.py`).

    constants = DRIFTS["p3o"](log_ratios, advantages, algorithm, sum_over_ranks)      -> {"ess": 0.83}

`log_ratios`, log pi_theta - log pi_rollout, and `advantages` are float64 [N], of this rank's tokens that train.
`sum_over_ranks(values)` gives each summed over all ranks, which call in the same order. numpy only.

Invariant: the result is that of the whole step, however its rows lie on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.divergence import MAX_LOG_RATIO

Sum = Callable[[Sequence[float]], Sequence[float]]
Constants = dict[str, float]

ESS = "ess"
M2_CLIP_LOW, M2_CLIP_HIGH = "m2_clip_low", "m2_clip_high"
NO_CLIP = 1e9
_GRID = 4096
"""Places that are looked at between two, twice: tau to 1e-6, and to rounding where no log-ratio is nearer."""


def second_moment(log_ratios: np.ndarray, advantages: np.ndarray, algorithm: AlgorithmConfig, total: Sum) -> Constants:
    """M2PO (Zheng et al. 2025, arXiv 2510.01161): the clip that brings the second moment of harmful log-ratios to its budget.

    Harmful are tokens that have gone where their advantage pushes: A > 0 with rho > 1, and A < 0 with rho < 1. m2 is the mean of
    d^2 over them. Above `m2_budget`, tau with mean(min(d^2, tau^2)) = m2_budget gives the clip 1 - exp(-tau) and exp(tau) - 1,
    at least clip_low and clip_high; within it nothing is clipped.
    """
    d, budget = np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO), algorithm.m2_budget
    squares = np.sort(np.square(d[advantages * d > 0]))
    below = np.concatenate([[0.0], np.cumsum(squares)])

    def bounded(taus: np.ndarray) -> list[float]:
        """The sum of min(d^2, tau^2) for each of them."""
        fewer = np.searchsorted(squares, taus * taus)
        return (below[fewer] + (len(squares) - fewer) * taus * taus).tolist()

    # Two sums at most, since each may wait for a device. No tau is below the root of the budget.
    taus = np.linspace(min(math.sqrt(budget), MAX_LOG_RATIO), MAX_LOG_RATIO, _GRID)
    count, all_squares, *sums = total([float(len(squares)), float(below[-1]), *bounded(taus)])
    moment = all_squares / max(1.0, count)
    if moment <= budget:
        return {"m2": moment, M2_CLIP_LOW: 1.0, M2_CLIP_HIGH: NO_CLIP}
    at = _reached(sums, budget * count)
    taus = np.linspace(taus[at - 1], taus[at], _GRID)
    sums = list(total(bounded(taus)))
    at = _reached(sums, budget * count)
    (low, high), (least, most) = taus[at - 1 : at + 1].tolist(), sums[at - 1 : at + 1]
    part = (budget * count - least) / (most - least) if most > least else 0.0
    tau = math.sqrt(low * low + min(1.0, max(0.0, part)) * (high * high - low * low))
    return {
        "m2": moment,
        M2_CLIP_LOW: max(-math.expm1(-tau), algorithm.clip_low),
        M2_CLIP_HIGH: max(math.expm1(tau), algorithm.clip_high),
    }


def _reached(sums: Sequence[float], wanted: float) -> int:
    """The first place, but for the very first, where sums that grow reach what is wanted."""
    return min(max(1, int(np.searchsorted(sums, wanted))), len(sums) - 1)


def effective_samples(
    log_ratios: np.ndarray, advantages: np.ndarray, algorithm: AlgorithmConfig, total: Sum
) -> Constants:
    """P3O (Fakoor et al. 2019, arXiv 1905.01756): (sum w)^2 / (N sum w^2) of the ratios w; 1 where all are equal."""
    ratios = np.exp(np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    count, first, second = total([float(len(ratios)), float(ratios.sum()), float(np.square(ratios).sum())])
    return {ESS: first * first / (count * second) if count else 1.0}


DRIFTS: Mapping[str, Callable[[np.ndarray, np.ndarray, AlgorithmConfig, Sum], Constants]] = {
    "m2po": second_moment,
    "p3o": effective_samples,
}
"""Policy loss -> what it needs to know of the step."""
