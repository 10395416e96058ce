"""Distillation: what a teacher's log-probs on the policy's own samples add to the loss of a token. Pure functions.

Owns the formulas of the loss; what a teacher adds to advantages is in `advantages.py`. Does not own who asks a teacher
(`roles/teacher.py`) or the sum over tokens (`losses.py`).

    at_sampled(config, batch, teacher_log_probs=...)    -> (loss [N], {"teacher_kl": [N]})
    at_likeliest(config, batch, ids=..., policy=..., teacher=...) -> (loss [N], {"teacher_divergence": [N]})

On-policy distillation trains on what the policy samples: Agarwal et al. 2024 (GKD, arXiv 2306.13649), Gu et al. 2024 (MiniLLM,
arXiv 2306.08543); the reverse KL at the sampled token alone: Lu and Thinking Machines Lab 2025, On-Policy Distillation.

Shapes: N response tokens, K tokens that are compared at the place of each. Log-probs are natural logarithms in float32.
"""

from __future__ import annotations

import math

import torch

from rondo.roles.algorithms.batch import Batch, Measured
from rondo.roles.algorithms.divergence import kl
from rondo.roles.algorithms.teachers import NONE, DistillationConfig, Tail

_LEAST_REST = 1e-6
"""What is left outside of the compared tokens counts as no less: below, float32 does not tell it from rounding."""


def at_sampled(
    config: DistillationConfig, batch: Batch, *, teacher_log_probs: torch.Tensor
) -> tuple[torch.Tensor | None, Measured]:
    """What is added to the loss of each token [N] (None: nothing, where the teacher is in the advantages), and what is measured.

    `teacher_kl` is log pi - log pi_teacher of the sampled token, whose mean estimates KL(pi || pi_teacher)."""
    teacher = floored(config, torch.where(batch.mask, teacher_log_probs, 0.0))
    measured = {"teacher_kl": (batch.log_probs - teacher).detach()}
    if config.form == "advantage":
        return None, measured
    return config.coef * sampled(config, batch.log_probs, teacher), measured


def sampled(config: DistillationConfig, log_probs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """A divergence's loss at sampled tokens [N], with x = log pi - log pi_teacher.

    Its gradient, over tokens that pi sampled, is the divergence's: x^2 / 2 has x grad log pi, whose mean is the gradient of
    KL(pi || pi_teacher); exp(-x) - 1 + x has (1 - pi_teacher / pi) grad log pi, with that of KL(pi_teacher || pi). (x itself,
    whose mean is the reverse KL, has a gradient of mean 0.)
    """
    return kl(log_probs, teacher, "k2" if config.divergence == "reverse" else "k3")


def at_likeliest(
    config: DistillationConfig, batch: Batch, *, ids: torch.Tensor, policy: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor | None, Measured]:
    """The same where the log-probs of several tokens [N, K] are compared; `policy` carries the gradient. Ids that are NONE are
    left out."""
    present = (ids != NONE) & batch.mask[:, None]
    found = divergence(config, policy, teacher, present)
    return config.coef * found, {"teacher_divergence": found.detach()}


def divergence(
    config: DistillationConfig, policy: torch.Tensor, teacher: torch.Tensor, present: torch.Tensor
) -> torch.Tensor:
    """Between the distributions over the tokens `present` of [N, K], [N]: 0 for a place without any.

    With P of the teacher and Q of the policy, reverse: KL(Q || P); forward: KL(P || Q); jsd, with M = beta P + (1 - beta) Q:
    beta KL(P || M) + (1 - beta) KL(Q || M) (Agarwal et al. 2024, arXiv 2306.13649). `forward_above_entropy`: KL(Q || P), and
    KL(P || Q) too where the entropy of P is above it (EOPD: Jin et al. 2026, arXiv 2603.07079). The tail as one more token:
    Tail-Aware Top-k On-Policy Distillation, 2026, arXiv 2608.14728.
    """
    policy, teacher = (whole(config.tail, each, present) for each in (policy, teacher))
    teacher = floored(config, teacher)  # what is left for other tokens is the teacher's own
    if config.tail == "bucket":
        present = torch.cat([present, present.any(1, keepdim=True)], 1)

    def kl_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.where(present, p.exp() * (p - q), 0.0).sum(1)

    if config.divergence == "jsd":
        mixed = torch.logaddexp(teacher + math.log(config.beta), policy + math.log1p(-config.beta))
        return config.beta * kl_of(teacher, mixed) + (1 - config.beta) * kl_of(policy, mixed)
    if config.divergence == "forward":
        return kl_of(teacher, policy)
    reverse = kl_of(policy, teacher)
    if config.forward_above_entropy is None:
        return reverse
    entropy = -torch.where(present, teacher.exp() * teacher, 0.0).sum(1)
    return torch.where(entropy > config.forward_above_entropy, reverse + kl_of(teacher, policy), reverse)


def whole(tail: Tail, log_probs: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [N, K], or with a bucket for the rest [N, K + 1]; 0 where no token is present."""
    kept = torch.where(present, log_probs, 0.0)
    if tail == "truncate":
        return kept
    some = present.any(1, keepdim=True)
    among = torch.where(present, log_probs, torch.where(some, -torch.inf, 0.0))
    total = among.logsumexp(1, keepdim=True)
    if tail == "renormalize":
        return torch.where(present, log_probs - total, 0.0)
    rest = (-torch.expm1(total.clamp(max=math.log1p(-_LEAST_REST)))).log()
    return torch.cat([kept, torch.where(some, rest, 0.0)], 1)


def floored(config: DistillationConfig, teacher: torch.Tensor) -> torch.Tensor:
    return teacher if config.min_log_prob is None else teacher.clamp(min=config.min_log_prob)
