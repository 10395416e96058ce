"""Losses: pure functions on the log-probs of response tokens, summed and not yet divided.

Owns the formulas of the policy loss and what is measured beside them. Does not own the model's forward, advantages, or
the optimizer step.

Invariant: `policy_sums` of a whole step equals the sum of `policy_sums` of any cut of it into micro-batches and ranks.
So the actor adds gradients up as rounds come, and divides once by the denominator of the true step.

    sums = policy_sums(algorithm, log_probs=..., ...); sums.loss.backward()          # for every micro-batch
    total = (a + b).reduced(group); float(total.loss) / denominator(total, "sample", max_new_tokens)

Shapes: N response tokens of all samples behind each other, in the order of `lengths` (S samples). Log-probs are natural
logarithms in float32. Masked tokens are selected out and never multiplied by 0: they may hold anything, NaN too.

A loss and a correction, ours or the user's, see a whole `Batch` and give a number a token, and perhaps what is to be measured:

    def loss(batch, algorithm) -> tensor [N], or (tensor [N], {"clip_fraction": tensor [N], ...})
    def correction(batch, algorithm) -> weights [N], or (weights [N], {...})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rondo.roles.algorithms.algorithm import AlgorithmConfig, KlEstimator, Normalizer, function_of
from rondo.roles.algorithms.sums import LossSums
from rondo.runtime.errors import Fatal

Measured = Mapping[str, torch.Tensor]
"""Name -> per token [N]: metrics are the means over unmasked tokens."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: beyond, exp overflows, and 0 x inf in the backward of a clipped branch would be NaN."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a micro-batch as losses see them. Tensors are float32 [N] and 0 at masked tokens; `log_probs` and `entropy`
    carry the gradient. A loss may count on whole samples, and on nothing about which of them share a micro-batch."""

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool [N]: the tokens that train."""
    lengths: Sequence[int]
    """Response tokens of each of the S samples, masked ones included."""
    ref_log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> float64 [S], over the unmasked tokens of each sample: the same wherever in a micro-batch a sample stands."""
        kept = torch.where(self.mask, values, 0.0)
        return torch.stack([part.double().sum() for part in kept.split(list(self.lengths))])

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> float64 [S], over the unmasked tokens of each sample; 0 of a sample without any."""
        return self.sums(values) / self.counts()

    def counts(self) -> torch.Tensor:
        """int64 [S]: the unmasked tokens of each sample, at least 1."""
        return torch.stack([part.sum().clamp(min=1) for part in self.mask.split(list(self.lengths))])

    def to_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """[S] -> float32 [N]: every token has its sample's."""
        spans = torch.tensor(self.lengths, device=self.mask.device)
        return torch.repeat_interleave(values.float(), spans, output_size=len(self.mask))


def ppo_clip(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = exp(log_probs - old_log_probs), per token, and where the
    clip at either side, or the dual clip, was what counted.

    Schulman et al. 2017, arXiv 1707.06347, equation 7; two bounds as in DAPO (Yu et al. 2025, arXiv 2503.14476,
    equation 10). `dual_clip` c > 1 bounds the loss of tokens with A < 0 by -c A (Ye et al. 2020, arXiv 1912.09729,
    equation 5).
    """
    advantages, low, high = batch.advantages, 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio = (batch.log_probs - batch.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    clipped_dual = (advantages < 0) & (ratio > algorithm.dual_clip)
    loss = torch.where(clipped_dual, -algorithm.dual_clip * advantages, loss)
    clipped_low, clipped_high = (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high)
    return loss, {
        "clip_fraction": clipped_low | clipped_high, "clip_low_fraction": clipped_low, "clip_high_fraction": clipped_high,
        "clip_dual_fraction": clipped_dual,
    }  # fmt: skip


def importance(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """Importance weights w from log pi_old - log pi_rollout.

    w is the ratio of a token (truncated importance sampling, Yao et al. 2025; masked: IcePop, Ling team 2025), or of its
    sample: "sequence" the product over the sample's tokens, "geometric" that to the power of 1 / tokens (Zheng et al. 2025,
    GSPO, arXiv 2507.18071, equation 7). Within [tis_low, tis_high] the weight is w; beyond, the nearest bound, or 0 with "mask".
    """
    low, high, masks = algorithm.tis_low, algorithm.tis_high, algorithm.tis_mode == "mask"
    log_ratio = batch.old_log_probs - batch.rollout_log_probs
    if algorithm.tis_level != "token":
        of_samples = batch.means if algorithm.tis_level == "geometric" else batch.sums
        log_ratio = batch.to_tokens(of_samples(log_ratio))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio < low) | (ratio > high)
    weights = torch.where(outside, 0.0, ratio) if masks else ratio.clamp(low, high)
    return weights, {"tis_weight_mean": weights, "tis_mask_fraction" if masks else "tis_clip_fraction": outside}


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
    k3 = _k3(-x)
    return k3 if estimator == "k3" else k3.clamp(-10.0, 10.0)


def denominator(total: LossSums, normalizer: Normalizer, max_new_tokens: int) -> float:
    """What the summed loss and its gradient are divided by; at least 1, since a step may be masked whole."""
    if normalizer == "token":
        return max(1.0, float(total.sums["tokens"]))
    samples = max(1.0, float(total.sums["samples"]))
    return samples * max_new_tokens if normalizer == "constant" else samples


def policy_sums(
    algorithm: AlgorithmConfig,
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

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, values, 0.0)

    batch = Batch(
        log_probs=chosen(log_probs),
        old_log_probs=chosen(log_probs.detach() if old_log_probs is None else old_log_probs),
        rollout_log_probs=chosen(rollout_log_probs),
        advantages=chosen(advantages),
        mask=keep,
        lengths=lengths,
        ref_log_probs=None if ref_log_probs is None else chosen(ref_log_probs),
        entropy=None if entropy is None else chosen(entropy),
    )
    drift = batch.log_probs.detach() - batch.old_log_probs
    mismatch = batch.log_probs.detach() - batch.rollout_log_probs
    ratio = drift.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, measured = _per_token(algorithm.policy_loss, POLICY_LOSSES, "algorithm.policy_loss", batch, algorithm)
    measured |= {
        "ratio_mean": ratio, "approx_kl": _k3(drift), "mismatch_mean": mismatch.abs(), "mismatch_kl": _k3(mismatch)
    }  # fmt: skip
    if batch.entropy is not None:
        measured["entropy"] = batch.entropy.detach()
    if algorithm.corrected_by is not None:
        weights, more = _per_token(algorithm.corrected_by, CORRECTIONS, "algorithm.correction", batch, algorithm)
        loss, measured = loss * weights.detach(), measured | more
    if algorithm.needs_reference:
        assert batch.ref_log_probs is not None
        divergence = kl(batch.log_probs, batch.ref_log_probs, algorithm.kl)
        loss = loss + algorithm.kl_coef * divergence
        measured["kl"] = divergence.detach()

    if algorithm.normalizer == "sample":
        loss = loss * batch.to_tokens(1.0 / batch.counts().float())
    sums = {
        "tokens": keep.sum(dtype=torch.float64),
        "samples": torch.tensor(len(lengths), dtype=torch.float64, device=log_probs.device),
        **{name: chosen(values).sum(dtype=torch.float64) for name, values in measured.items()},
    }
    maxes = {"ratio_max": chosen(ratio).max().double(), "mismatch_max": mismatch.abs().max().double()}
    return LossSums(chosen(loss).sum(), sums, maxes)


def _per_token(
    name: str, ours: Mapping[str, Callable[..., Any]], setting: str, batch: Batch, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a loss or a correction gives, and what it measures. Fatal for what is no number a token."""
    found = function_of(name, ours, setting)(batch, algorithm)
    values, measured = found if isinstance(found, tuple) else (found, {})
    for each in (values, *measured.values()):
        if getattr(each, "shape", None) != batch.mask.shape:
            raise Fatal(
                f"{setting} must give tensors with a number for each of {len(batch.mask)} tokens, "
                f"got {list(each.shape) if isinstance(each, torch.Tensor) else each!r:.80}. Correct it"
            )
    return values, {key: each.detach() for key, each in measured.items()}


POLICY_LOSSES: Mapping[str, Callable[..., Any]] = {"ppo_clip": ppo_clip}
CORRECTIONS: Mapping[str, Callable[..., Any]] = {"importance": importance}


def _k3(x: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x: the mean estimates KL(q || p) where samples come from q and x = log p - log q."""
    x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x.exp() - 1 - x
