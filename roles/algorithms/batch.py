"""Batch: the samples of a micro-batch as losses and corrections see them.

Owns the way between tokens and samples. Does not own any formula.

    batch.to_tokens(batch.means(batch.log_probs - batch.old_log_probs))      # every token has its sample's mean log-ratio

Shapes: N response tokens of all samples behind each other, in the order of `lengths` (S samples).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rondo.roles.algorithms.divergence import MAX_LOG_RATIO

Measured = Mapping[str, torch.Tensor]
"""Name -> per token [N]: metrics are the means over unmasked tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors are float32 [N] and 0 at masked tokens; `log_probs` and `entropy` carry the gradient. A loss may count on whole
    samples, and on nothing about which of them share a micro-batch."""

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
    constants: Mapping[str, float] = field(default_factory=dict)
    """What was measured over the whole step before its first gradient (`drift.py`), for the losses that need it."""

    def ratio(self) -> torch.Tensor:
        """[N]: pi_theta / pi_old of every token."""
        return bounded_exp(self.log_probs - self.old_log_probs)

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


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, of log-ratios within +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
