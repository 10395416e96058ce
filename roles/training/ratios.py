"""Ratios of a step by quantile: of pi / pi_old over all uses of its tokens, and of what of a row lies outside of the clip.

Owns these figures. Does not own the ratios that a loss computes (`roles/algorithms/`): those of a sample, say, are another thing.
Invariant: additive over rows, rounds and ranks.

    ratios = Ratios(algorithm); ratios.add(mine, old, masks); ratios.metrics()["ratio_p99"]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.training.quantiles import LOG_RATIOS, SHARES, SPREAD, UPPER, Counts, quantiles


class Ratios:
    def __init__(self, algorithm: AlgorithmConfig) -> None:
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        self._low, self._high = np.log(low) if low > 0 else -np.inf, np.log(high)
        self._tokens, self._rows = Counts(LOG_RATIOS), Counts(SHARES)

    def add(self, mine: Sequence[np.ndarray], old: Sequence[np.ndarray | None], masks: Sequence[np.ndarray]) -> None:
        """Log-probs and mask of each row, [R] each. old None: the same as mine."""
        lengths = [len(each) for each in masks]
        chosen = np.concatenate(masks) > 0
        if not chosen.any():
            return
        before = [each if given is None else given for each, given in zip(mine, old, strict=True)]
        moved = np.concatenate(mine)[chosen] - np.concatenate(before)[chosen]
        owners = np.repeat(np.arange(len(lengths)), lengths)[chosen]
        outside = (moved < self._low) | (moved > self._high)
        num, num_outside = np.bincount(owners), np.bincount(owners, outside.astype(np.float64))
        self._tokens.add(moved)
        self._rows.add(num_outside[num > 0] / num[num > 0])

    def reduce(self, device: torch.device | str) -> None:
        """The same over all ranks (collective)."""
        for counts in (self._tokens, self._rows):
            shared = torch.from_numpy(counts.num).to(device)
            dist.all_reduce(shared)
            counts.num = shared.cpu().numpy()

    def metrics(self) -> dict[str, float]:
        ratios = quantiles(LOG_RATIOS, self._tokens.num, SPREAD)
        outside = quantiles(SHARES, self._rows.num, UPPER)
        return {f"ratio_{name}": float(np.exp(value)) for name, value in ratios.items()} | {
            f"outside_clip_{name}": value for name, value in outside.items()
        }
