"""How long readers of a task waited for their batches: a histogram of fixed size, and its percentiles.

Owns the buckets: four to a doubling, from one microsecond to over an hour, so a percentile is told to within a fifth.

    waited.add(0.003); waited.percentiles(0.5, 0.99)      # seconds: the upper edges of the buckets that they lie in
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

_A_DOUBLING, _NUM_BUCKETS = 4, 136


class Waited:
    """Counts since the coordinator began; equal waits give equal percentiles."""

    def __init__(self) -> None:
        self.num_waits = 0
        self._buckets = [0] * _NUM_BUCKETS

    def add(self, seconds: float) -> None:
        bucket = math.ceil(_A_DOUBLING * math.log2(max(1.0, 1e6 * seconds)))
        self._buckets[min(bucket, _NUM_BUCKETS - 1)] += 1
        self.num_waits += 1

    def percentiles(self, *parts: float) -> list[float]:
        """For each part: the seconds within which so much of all waits ended; 0 without any."""
        below = list(accumulate(self._buckets))
        edges = [bisect_left(below, part * self.num_waits) for part in parts]
        return [1e-6 * 2.0 ** (edge / _A_DOUBLING) if self.num_waits else 0.0 for edge in edges]
