"""What a loss adds up: sums over tokens and samples, undivided, until the true step is whole.

Owns adding, sharing over ranks and what metrics are of it. Does not own any formula.

    total = (a + b).reduced(group); total.metrics() -> {"tokens": ..., "samples": ..., "clip_fraction": ..., "kl": ...}

Invariant: the sums of a step are the same however it is cut into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

TOKENS_OF = "tokens_"
"""In front of a kind of samples: how many tokens theirs are, over which what is named after the kind is a mean."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over some tokens and samples. `loss` carries the gradient; the rest is detached and float64. `sums` hold at least
    "tokens" and "samples", how many are counted."""

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor]
    maxes: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss,
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxes[name]) for name, value in self.maxes.items()},
        )

    def detached(self) -> LossSums:
        """The same without the graph: what is left after `loss.backward()`."""
        return replace(self, loss=self.loss.detach())

    def weightless(self) -> LossSums:
        """The same graph with weight 0 and nothing counted: for a rank that has no rows in a round."""
        return LossSums(
            self.loss * 0.0,
            {name: torch.zeros_like(value) for name, value in self.sums.items()},
            {name: torch.zeros_like(value) for name, value in self.maxes.items()},
        )

    def reduced(self, group: dist.ProcessGroup | None) -> LossSums:
        """The same over all ranks of `group`, without gradient (collective); None is this process alone."""
        if group is None:
            return self
        sums = torch.stack([self.loss.detach().double(), *self.sums.values()])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        maxes = torch.stack(list(self.maxes.values())) if self.maxes else sums[:0]
        dist.all_reduce(maxes, dist.ReduceOp.MAX, group=group)
        return LossSums(
            sums[0],
            dict(zip(self.sums, sums[1:], strict=True)),
            dict(zip(self.maxes, maxes, strict=True)),
        )

    def metrics(self) -> dict[str, float]:
        """How many tokens and samples, the means of all other sums over the tokens, or over those of a kind that is there, and
        the greatest of the rest."""
        # Read back at once: a device is waited for once a step, not once a figure.
        read = torch.stack([*self.sums.values(), *self.maxes.values()]).tolist()
        sums = dict(zip(self.sums, read, strict=False))
        among = {name: sums.get(TOKENS_OF + name.rpartition("_")[2], max(1.0, sums["tokens"])) for name in sums}
        counted = ("tokens", "samples", *(name for name in sums if name.startswith(TOKENS_OF)))
        means = {name: sums[name] / among[name] for name in sums if name not in counted and among[name]}
        counts = {name: sums[name] for name in ("tokens", "samples")}
        return counts | means | dict(zip(self.maxes, read[len(sums) :], strict=True))
