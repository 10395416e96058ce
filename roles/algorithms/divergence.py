"""Divergence: the KL to the reference policy, estimated at every sampled token.

Owns the estimators, for the loss (torch, with a gradient) and for the reward (numpy, in a role without torch). Does not own where
the term goes (`losses.py`, `advantages.py`).

    x = log pi_theta - log pi_ref      k1: x    k2: x^2 / 2    k3: exp(-x) - 1 + x    low_var: k3 clamped at +-10
    unbiased: k3 x pi_theta / pi_old

From Schulman, Approximating KL Divergence, 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rondo.roles.algorithms.algorithm import KlEstimator

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: beyond, exp overflows, and 0 x inf in the backward of a clipped branch would be NaN."""
_LOW_VAR = 10.0


def k3(x: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x: the mean estimates KL(q || p) where samples come from q and x = log p - log q."""
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x.exp() - 1 - x


def kl(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KlEstimator, ratio: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(pi_theta || pi_ref) at each sampled token [N]; `ratio`, pi_theta / pi_old with its gradient, for "unbiased".

    As a loss, k1 has a gradient of mean 0 on on-policy samples, k2 that of the KL, and k3 that of the KL the other way round;
    "unbiased" has that of the KL on samples of pi_old (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    x = log_probs - ref_log_probs
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    found = k3(-x)
    if estimator == "unbiased":
        assert ratio is not None
        return found * ratio
    return found if estimator == "k3" else found.clamp(-_LOW_VAR, _LOW_VAR)


def kl_of_samples(log_probs: np.ndarray, ref_log_probs: np.ndarray, estimator: KlEstimator) -> np.ndarray:
    """The same for the reward: float64 [R], of log-probs under the policy that sampled, for which k1 and k3 are unbiased."""
    x = log_probs.astype(np.float64) - ref_log_probs.astype(np.float64)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x * x / 2
    bounded = np.clip(-x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    found = np.expm1(bounded) - bounded
    return found if estimator == "k3" else np.clip(found, -_LOW_VAR, _LOW_VAR)
