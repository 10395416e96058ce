"""Losses: pure functions on the log-probs of response tokens, summed and not yet divided.

Owns the formulas of the policy loss and what is measured beside them. Does not own the model's forward, advantages, or
the optimizer step.

Invariant: `policy_sums` of a whole step equals the sum of `policy_sums` of any cut of it into micro-batches and ranks.
So the actor adds gradients up as rounds come, and divides once by the denominator of the true step.

    sums = policy_sums(algorithm, log_probs=..., ...); sums.loss.backward()          # for every micro-batch
    total = (a + b).reduced(group); float(total.loss) / denominator(total, "sample", max_new_tokens)

Shapes: N response tokens of all samples behind each other, in the order of `lengths` (S samples). Log-probs are natural
logarithms in float32. Masked tokens are selected out and never multiplied by 0: they may hold anything, NaN too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rondo.roles.algorithms.algorithm import Algorithm, KlEstimator, Normalizer, TisLevel, TisMode
from rondo.roles.algorithms.sums import LossSums

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: beyond, exp overflows, and 0 x inf in the backward of a clipped branch would be NaN."""


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """Per token [N]: the loss, the ratio pi_theta / pi_old, and whether the clip at either side, or the dual clip, was what
    counted."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    clipped_dual: torch.Tensor


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedLoss:
    """max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = exp(log_probs - old_log_probs), per token [N].

    Schulman et al. 2017, arXiv 1707.06347, equation 7; two bounds as in DAPO (Yu et al. 2025, arXiv 2503.14476,
    equation 10). `dual_clip` c > 1 bounds the loss of tokens with A < 0 by -c A (Ye et al. 2020, arXiv 1912.09729,
    equation 5).
    """
    ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    loss = torch.maximum(plain, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if dual_clip is not None:
        clipped_dual = (advantages < 0) & (ratio > dual_clip)
        loss = torch.where(clipped_dual, -dual_clip * advantages, loss)
    clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    return ClippedLoss(loss, ratio.detach(), clipped_low, clipped_high, clipped_dual)


@dataclass(frozen=True, slots=True)
class Correction:
    """Per token [N]: the weight of its loss, and whether the ratio was out of bounds."""

    weights: torch.Tensor
    outside: torch.Tensor


def correction(
    log_ratio: torch.Tensor,
    keep: torch.Tensor,
    lengths: Sequence[int],
    *,
    low: float,
    high: float,
    mode: TisMode,
    level: TisLevel,
) -> Correction:
    """Importance weights from log_ratio = log pi_old - log pi_rollout [N], of the tokens that `keep` chooses.

    w is the ratio of a token (truncated importance sampling, Yao et al. 2025; masked: IcePop, Ling team 2025), or of its
    sample: "sequence" the product over the sample's tokens, "geometric" that to the power of 1 / tokens (Zheng et al. 2025,
    GSPO, arXiv 2507.18071, equation 7). Within [low, high] the weight is w; beyond, the nearest bound, or 0 with "mask".
    """
    log_ratio = torch.where(keep, log_ratio, 0.0)
    if level != "token":
        # Sample by sample in float64: the same weight wherever in a micro-batch a sample stands.
        totals = torch.stack([part.double().sum() for part in log_ratio.split(list(lengths))])
        if level == "geometric":
            totals = totals / torch.stack([part.sum().clamp(min=1) for part in keep.split(list(lengths))])
        spans = torch.tensor(lengths, device=keep.device)
        log_ratio = torch.repeat_interleave(totals.float(), spans, output_size=len(keep))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio < low) | (ratio > high)
    weights = ratio.clamp(low, high) if mode == "truncate" else torch.where(outside, 0.0, ratio)
    return Correction(weights, outside)


def kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """KL(pi_theta || pi_ref) estimated at each sampled token [N], with x = log_probs - ref_log_probs.

    k1: x. k2: x^2 / 2. k3: exp(-x) - 1 + x. low_var: k3 clamped at +-10. From Schulman, Approximating KL Divergence,
    2020. As a loss, k1 has a gradient of mean 0 on on-policy samples.
    """
    x = log_probs - ref_log_probs
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = (-x).exp() - 1 + x
    return k3 if estimator == "k3" else k3.clamp(-10.0, 10.0)


def denominator(total: LossSums, normalizer: Normalizer, max_new_tokens: int) -> float:
    """What the summed loss and its gradient are divided by; at least 1, since a step may be masked whole."""
    if normalizer == "token":
        return max(1.0, float(total.sums["tokens"]))
    samples = max(1.0, float(total.sums["samples"]))
    return samples * max_new_tokens if normalizer == "constant" else samples


def policy_sums(
    algorithm: Algorithm,
    *,
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> LossSums:
    """The undivided policy loss of some samples, and the sums that its metrics are made of: means over unmasked tokens.

    All tensors are [N]; `log_probs` carries the gradient, `mask` is 1 at tokens that the policy sampled.
    `old_log_probs` None takes the detached new ones. ValueError when the algorithm needs `ref_log_probs` and they are
    missing. `mismatch_*` compare the trainer's log-probs with the engine's: on-policy a measure of their numerics alone, else of
    both that and the steps between. `approx_kl` is k3 against pi_old.
    """
    if sum(lengths) != len(log_probs):
        raise ValueError(f"lengths must add up to the number of log-probs, {len(log_probs)}, got {sum(lengths)}.")
    if algorithm.needs_reference and ref_log_probs is None:
        raise ValueError(f"ref_log_probs must be given with kl_coef {algorithm.kl_coef}, got none.")
    keep = mask > 0
    own = log_probs.detach()
    old = own if old_log_probs is None else old_log_probs

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, values, 0.0)

    new, old, rollout = chosen(log_probs), chosen(old), chosen(rollout_log_probs)
    terms = POLICY_LOSSES[algorithm.policy_loss](algorithm, new, old, chosen(advantages))
    loss = terms.loss
    drift, mismatch = new.detach() - old, new.detach() - rollout
    measured: dict[str, torch.Tensor] = {
        "clip_fraction": terms.clipped_low | terms.clipped_high,
        "clip_low_fraction": terms.clipped_low,
        "clip_high_fraction": terms.clipped_high,
        "clip_dual_fraction": terms.clipped_dual,
        "ratio_mean": terms.ratio,
        "approx_kl": _k3(drift),
        "mismatch_mean": mismatch.abs(),
        "mismatch_kl": _k3(mismatch),
    }
    if entropy is not None:
        measured["entropy"] = entropy.detach()
    if algorithm.tis_high is not None:
        corrected = correction(
            old - rollout, keep, lengths, low=algorithm.tis_low, high=algorithm.tis_high,
            mode=algorithm.tis_mode, level=algorithm.tis_level,
        )  # fmt: skip
        loss = loss * corrected.weights
        share = "tis_clip_fraction" if algorithm.tis_mode == "truncate" else "tis_mask_fraction"
        measured |= {"tis_weight_mean": corrected.weights, share: corrected.outside}
    if algorithm.needs_reference:
        assert ref_log_probs is not None
        divergence = kl(new, chosen(ref_log_probs), algorithm.kl)
        loss = loss + algorithm.kl_coef * divergence
        measured["kl"] = divergence.detach()

    weights = _token_weights(keep, lengths, algorithm.normalizer)
    sums = {
        "tokens": keep.sum(dtype=torch.float64),
        "samples": torch.tensor(len(lengths), dtype=torch.float64, device=log_probs.device),
        **{name: chosen(values).sum(dtype=torch.float64) for name, values in measured.items()},
    }
    maxes = {
        "ratio_max": chosen(terms.ratio).max().double(),
        "mismatch_max": mismatch.abs().max().double(),
    }
    return LossSums((chosen(loss) * weights).sum(), sums, maxes)


def _ppo_clip(
    algorithm: Algorithm, log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor
) -> ClippedLoss:
    return ppo_clip(
        log_probs, old_log_probs, advantages,
        clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, dual_clip=algorithm.dual_clip,
    )  # fmt: skip


POLICY_LOSSES: Mapping[str, Any] = {"ppo_clip": _ppo_clip}


def _token_weights(keep: torch.Tensor, lengths: Sequence[int], normalizer: Normalizer) -> torch.Tensor:
    """[N]: for "sample" 1 / (unmasked tokens of the token's sample), else 1."""
    if normalizer != "sample":
        return torch.ones_like(keep, dtype=torch.float32)
    spans = torch.tensor(lengths, device=keep.device)
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=keep.device), spans, output_size=len(keep))
    counts = torch.zeros(len(lengths), device=keep.device).index_add_(0, sample, keep.float())
    return 1.0 / counts.clamp(min=1.0)[sample]


def _k3(x: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x: the mean estimates KL(q || p) where samples come from q and x = log p - log q."""
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x.exp() - 1 - x
