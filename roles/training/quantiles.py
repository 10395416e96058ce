"""Quantiles of a step: how often a figure was in each of fixed bins, which adds up over rounds and ranks.

Owns the bins. Does not own what is counted. Pure numpy. Invariant: additive; a quantile is the lower bound of the bin that the
value of that rank is in, so that it is off by the width of one bin.

    lengths = Counts(LENGTHS); lengths.add(np.array([5, 7])); quantiles(LENGTHS, lengths.num, {"p50": 0.5})   ->   {"p50": 5.0}
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

LENGTHS = np.concatenate([np.arange(256.0), np.floor(256 * 2 ** (np.arange(16 * 32) / 32))])
"""Exact below 256, then 2 % wide."""
SHARES = np.linspace(0, 1, 101)
_NEAR = 10 ** (np.arange(-100, 41) / 20)
LOG_RATIOS = np.concatenate([-_NEAR[::-1], [0], _NEAR])
"""12 % wide from 1e-5 to 100 on both sides of 0; a log-ratio that is nearer to 0 counts as 0."""
_ODD, _BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(44)
SPREAD: Mapping[str, float] = {"p1": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
UPPER: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p100": 1.0}
WHOLE: Mapping[str, float] = {"p0": 0.0, "p10": 0.1, **UPPER}


class Counts:
    """Of values among `bins`, by their lower bounds."""

    def __init__(self, bins: np.ndarray) -> None:
        self._bins, self.num = bins, np.zeros(len(bins), np.int64)

    def add(self, values: np.ndarray) -> None:
        at = np.searchsorted(self._bins, values, "right") - 1
        self.num += np.bincount(at.clip(0), minlength=len(self._bins))


def quantiles(bins: np.ndarray, num: np.ndarray, of: Mapping[str, float]) -> dict[str, float]:
    """Name -> quantile, of how many values are in each bin; empty without any."""
    upto = np.cumsum(num)
    if not len(upto) or not upto[-1]:
        return {}
    ranks = [max(1, int(np.ceil(part * upto[-1]))) for part in of.values()]
    return dict(zip(of, bins[np.searchsorted(upto, ranks)].tolist(), strict=True))


def repetition(rows: list[np.ndarray], of: int = 4) -> np.ndarray:
    """float64: of each row of token ids that has as many, the part of its n-grams that stood in it before."""
    lengths = np.array([max(0, len(row) - of + 1) for row in rows], np.int64)
    if not lengths.any():
        return np.zeros(0)
    # The n-grams of all rows at once: the row in the upper bits, in front of 44 bits of a hash, and sorted.
    tokens = np.concatenate([row for row in rows if len(row) >= of]).astype(np.uint64)
    chosen = lengths[lengths > 0]
    ends = np.cumsum(chosen)
    owners = np.repeat(np.arange(len(chosen)), chosen)
    at = np.arange(ends[-1]) + (of - 1) * owners
    hashed = np.zeros(len(at), np.uint64)
    for step in range(of):
        hashed = (hashed + tokens[at + step] + np.uint64(1)) * _ODD
        hashed ^= hashed >> np.uint64(29)
    ordered = np.sort(owners.astype(np.uint64) << _BITS | hashed >> np.uint64(64) - _BITS)
    first = np.append(True, ordered[1:] != ordered[:-1])
    distinct = np.bincount((ordered[first] >> _BITS).astype(np.int64), minlength=len(chosen))
    return np.asarray(1 - distinct / chosen)
