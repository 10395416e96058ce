"""The gap between the engine's log-probs and the trainer's for the same tokens under the same weights, by modality.

Owns which tokens can be compared and the figures of a step. A token sampled under version v is compared with the trainer's own
log-prob where the step trains on v, else with actor_fwd's where that scored it under v; what nobody scored under its own
version is not measured, and counted by what is missing in `log_prob_gap_tokens`. Nor are tokens behind a change of version in
mid-sample: the engine made them over a cache that older weights have filled; nor the last one before it, since servers tell the
change one token off. So staleness is never taken for a gap: what is left is numerics, a wrong mask, a wrong position, a wrong
picture.

    gap = Gap(); gap.add(mine, sampled, chosen, ("image",)); gap.metrics()["log_prob_gap_image"]

Invariant: additive over rows, rounds and ranks. A row of several modalities counts for each of them, and once for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.models.media.inputs import MODALITIES
from rondo.runtime.errors import Fatal

KINDS = ("", "text", *MODALITIES)
"""All rows, rows without media, and rows with each modality."""


class Gap:
    """Sums over the tokens of one step. For each kind: tokens, sum of |d|, sum of k3, greatest |d|, with
    d = trainer's - engine's log-prob in nats, and k3 = exp(d) - 1 - d, which estimates KL(engine || trainer)."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(KINDS), 3))
        self._max = np.zeros(len(KINDS))

    def add(self, mine: np.ndarray, sampled: np.ndarray, chosen: np.ndarray, modalities: Sequence[str]) -> None:
        """One row: float32 [R] each, and which tokens count, bool [R]."""
        if not chosen.any():
            return
        difference = (mine[chosen] - sampled[chosen]).astype(np.float64)
        absolute = np.abs(difference)
        sums = [len(difference), absolute.sum(), (np.expm1(difference) - difference).sum()]
        for kind in ("", *(modalities or ("text",))):
            at = KINDS.index(kind)
            self._sums[at] += sums
            self._max[at] = max(self._max[at], absolute.max())

    def reduce(self, device: torch.device | str) -> None:
        """The same over all ranks (collective)."""
        sums, greatest = torch.from_numpy(self._sums).to(device), torch.from_numpy(self._max).to(device)
        dist.all_reduce(sums)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        self._sums, self._max = sums.cpu().numpy(), greatest.cpu().numpy()

    def metrics(self) -> dict[str, float]:
        """`log_prob_gap` (mean of |d|), `..._max`, `..._k3`, `..._tokens` over all rows, and `log_prob_gap_<kind>` with
        its `_max` and `_k3` for each kind that was there. Empty when nothing could be compared."""
        found: dict[str, float] = {}
        for kind, (tokens, absolute, k3), greatest in zip(KINDS, self._sums.tolist(), self._max.tolist(), strict=True):
            if not tokens:
                continue
            name = f"log_prob_gap_{kind}" if kind else "log_prob_gap"
            found |= {name: absolute / tokens, f"{name}_max": greatest, f"{name}_k3": k3 / tokens}
            if not kind:
                found[f"{name}_tokens"] = tokens
        return found


def refuse_gap(metrics: Mapping[str, Any], limit: float | None) -> None:
    """End the run where engine and trainer disagree by more than the settings allow (nats); the step is not committed."""
    gap = metrics.get("log_prob_gap", 0.0)
    if limit is not None and not gap <= limit:
        raise Fatal(
            f"the log-prob gap between engine and trainer must be at most train.max_log_prob_gap {limit:g} nats, "
            f"got {gap:g} in step {metrics['step']}. Look at log_prob_gap_* in metrics.jsonl for the modality, or raise it"
        )
