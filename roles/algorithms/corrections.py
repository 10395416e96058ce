"""Corrections: what the policy loss of every token is weighted with, and which tokens leave the loss.

Owns the formulas: importance weights from the distance between the trainer's old policy and the engine's, and the mask of samples
that the policy has left behind. Does not own the policy loss.

    weights, kept, measured = correct(batch, algorithm)

A correction gives weights [N], or (weights, {...}) with what is to be measured, or (weights, mask [N]) and (weights, mask, {...})
with the tokens that stay: the others leave the loss whole, its KL and entropy terms too, and what a step is divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.batch import Batch, Measured, bounded_exp


def importance(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor, Measured]:
    """Importance weights w from log pi_old - log pi_rollout.

    w is the ratio of a token (truncated importance sampling, Yao et al. 2025), or of its sample: "sequence" the product over
    the sample's tokens, "geometric" that to the power of 1 / tokens (Zheng et al. 2025, GSPO, arXiv 2507.18071, equation 7).
    Within [tis_low, tis_high] the weight is w. Beyond, with "truncate", it is the nearest bound; with "mask" 0, as IcePop has it
    (Ling team 2025, arXiv 2510.18855); with "reject" the token is none of the loss (masked importance sampling, Li et al. 2025,
    When Speed Kills Stability).
    """
    low, high, mode = algorithm.tis_low, algorithm.tis_high, algorithm.tis_mode
    log_ratio = batch.old_log_probs - batch.rollout_log_probs
    if algorithm.tis_level != "token":
        of_samples = batch.means if algorithm.tis_level == "geometric" else batch.sums
        log_ratio = batch.to_tokens(of_samples(log_ratio))
    ratio = bounded_exp(log_ratio)
    outside = (ratio < low) | (ratio > high)
    weights = ratio.clamp(low, high) if mode == "truncate" else torch.where(outside, 0.0, ratio)
    kept = ~outside if mode == "reject" else torch.ones_like(outside)
    share = "tis_clip_fraction" if mode == "truncate" else "tis_mask_fraction"
    return weights, kept, {"tis_weight_mean": weights, share: outside}


def left_behind(batch: Batch, delta: float) -> torch.Tensor:
    """bool [N]: tokens of negative advantage in samples that are by more than `delta` nats a token, in their mean, less likely
    now than when they were sampled. Off-policy sequence masking (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, section
    3.1)."""
    fallen = batch.means(batch.rollout_log_probs - batch.log_probs.detach())
    return (batch.advantages < 0) & batch.to_tokens(fallen > delta).bool()


CORRECTIONS: Mapping[str, Callable[..., Any]] = {"importance": importance}
