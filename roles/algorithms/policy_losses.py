"""Policy losses: from the log-probs of a micro-batch to the loss of every token.

Owns the formulas by name, of which an algorithm's record names one or the user's own. Does not own what a step is divided by
(`losses.py`), advantages, KL to the reference or corrections.

    loss, measured = POLICY_LOSSES["gspo"](batch, algorithm)

With rho = pi_theta / pi_old of a token, A its advantage and sg that nothing is derived through what it holds. Under the weights
that sampled a token rho is 1, and the gradient of each of these losses is that of -A log pi_theta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.batch import Batch, Measured, bounded_exp
from rondo.roles.algorithms.divergence import k3
from rondo.roles.algorithms.drift import ESS, M2_CLIP_HIGH, M2_CLIP_LOW, NO_CLIP

_SOFTLY_CLIPPED = 0.9
"""A token of SAPO whose gradient is weighed with less than this part counts as clipped."""


def ppo_clip(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017, arXiv 1707.06347, equation 7; two bounds as in DAPO (Yu et al. 2025, arXiv 2503.14476,
    equation 10). `dual_clip` c > 1 bounds the loss of tokens with A < 0 by -c A (Ye et al. 2020, arXiv 1912.09729,
    equation 5).
    """
    return _clipped(batch.ratio(), batch, algorithm, algorithm.clip_low, algorithm.clip_high)


def gspo(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """The same with one ratio a sample, the geometric mean of its tokens': GSPO (Zheng et al. 2025, arXiv 2507.18071,
    equations 5 and 7)."""
    ratio = bounded_exp(batch.to_tokens(batch.means(batch.log_probs - batch.old_log_probs)))
    return _clipped(ratio, batch, algorithm, algorithm.clip_low, algorithm.clip_high)


def gspo_token(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """The sample's ratio as a number, with the gradient of each token's own log-prob: s_t = sg(s) pi_t / sg(pi_t), for advantages
    that differ from token to token (Zheng et al. 2025, arXiv 2507.18071, equations 13 and 14)."""
    of_sample = batch.to_tokens(batch.means(batch.log_probs - batch.old_log_probs)).detach()
    ratio = bounded_exp(of_sample + batch.log_probs - batch.log_probs.detach())
    return _clipped(ratio, batch, algorithm, algorithm.clip_low, algorithm.clip_high)


def m2po(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """The clipped loss within bounds that the step's own second moment asks for (`drift.second_moment`), never tighter than
    clip_low and clip_high; none where the moment is within its budget: M2PO (Zheng et al. 2025, arXiv 2510.01161), as Relax has
    it. The paper masks tokens instead: it drops those of greatest moment until the mean over the rest is within the budget."""
    low, high = batch.constants.get(M2_CLIP_LOW, 1.0), batch.constants.get(M2_CLIP_HIGH, NO_CLIP)
    return _clipped(batch.ratio(), batch, algorithm, low, high)


def sapo(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, with a tau for each sign of A: SAPO (Gao et al. 2025, arXiv 2511.20347). The gate
    fades where a hard clip would cut."""
    tau = torch.where(batch.advantages > 0, algorithm.sapo_tau_positive, algorithm.sapo_tau_negative)
    gate = torch.sigmoid(tau * (batch.ratio() - 1))
    loss = -4 / tau * gate * batch.advantages
    return loss, {"clip_fraction": 4 * gate * (1 - gate) < _SOFTLY_CLIPPED}


def reinforce(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi_theta: REINFORCE (Williams 1992) where rho is 1, and beyond that with
    truncated importance weights: CISPO (MiniMax 2025, MiniMax-M1, arXiv 2506.13585, equations 4 and 5). No token's gradient is
    lost to the clip; `clip_low` 1 truncates above alone, as in ScaleRL (Khatri et al. 2025, arXiv 2510.13786)."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio = batch.ratio().detach()
    return _weighed(ratio.clamp(low, high), ratio < low, ratio > high, batch)


def cispo_signed(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """CISPO with a bound for each sign of A: min(rho, 1 + clip_high) where A >= 0, max(rho, 1 - clip_low) where A < 0, as Relax
    has it (arXiv 2604.11554). Those of A < 0 weigh `dual_clip` at most."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio, down = batch.ratio().detach(), batch.advantages < 0
    weights = torch.where(down, ratio.clamp(low, max(low, algorithm.dual_clip)), ratio.clamp(max=high))
    return _weighed(weights, down & (ratio < low), ~down & (ratio > high), batch)


def p3o(batch: Batch, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, Measured]:
    """-sg(min(rho, e)) A log pi_theta + (1 - e) k3(pi_theta || pi_old), where e is the step's normalised effective sample size
    (`drift.effective_samples`): P3O (Fakoor et al. 2019, arXiv 1905.01756)."""
    ess = batch.constants.get(ESS, 1.0)
    ratio = batch.ratio().detach()
    loss, measured = _weighed(ratio.clamp(max=ess), torch.zeros_like(batch.mask), ratio > ess, batch)
    return loss + (1 - ess) * k3(batch.old_log_probs - batch.log_probs), measured


def _clipped(
    ratio: torch.Tensor, batch: Batch, algorithm: AlgorithmConfig, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, Measured]:
    """The clipped surrogate of these ratios, and where the clip at either side, or the dual clip, was what counted."""
    advantages, low, high = batch.advantages, 1 - clip_low, 1 + clip_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    clipped_dual = (advantages < 0) & (ratio > algorithm.dual_clip)
    loss = torch.where(clipped_dual, -algorithm.dual_clip * advantages, loss)
    measured = _sides((advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high))
    return loss, {**measured, "clip_dual_fraction": clipped_dual}


def _weighed(
    weights: torch.Tensor, low: torch.Tensor, high: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, Measured]:
    return -weights * batch.advantages * batch.log_probs, _sides(low, high)


def _sides(low: torch.Tensor, high: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"clip_fraction": low | high, "clip_low_fraction": low, "clip_high_fraction": high}


POLICY_LOSSES: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (ppo_clip, gspo, gspo_token, m2po, sapo, reinforce, cispo_signed, p3o)
}
