"""Dealing numbers to ranks so that their sums are about equal.

Owns the largest differencing method (Karmarkar and Karp, 1982, for k parts as in Korf, 2009): keep k-tuples of parts, always
merge the two tuples whose sums differ most, the largest part of one with the smallest of the other.

    balanced([9, 8, 7, 6], 2)                   -> [[0, 3], [1, 2]]     sums 15 and 15
    balanced([9, 1, 1, 1], 2, equal_size=True)  -> [[0, 3], [1, 2]]     two each

Invariant: every index is in exactly one part; equal input gives equal output.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Part = tuple[int, list[int]]  # sum, indices


def balanced(costs: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of `costs` in `parts` parts, each ascending. `equal_size` makes their lengths differ by at most one."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    if equal_size:
        # One of each rank at a time: every tuple begins with a row (or none) for each part, and merging keeps lengths equal.
        rows = [order[at : at + parts] for at in range(0, len(order), parts)]
        starts = [[(costs[i], [i]) for i in row] + [(0, [])] * (parts - len(row)) for row in rows]
    else:
        starts = [[(costs[i], [i])] + [(0, [])] * (parts - 1) for i in order]
    if not starts:
        return [[] for _ in range(parts)]
    if equal_size and len(order) % parts:
        short = starts.pop()
        merged = _difference(starts) if starts else [(0, [])] * parts
        merged = _merge(merged, short)  # last, so that only one row each makes lengths differ
    else:
        merged = _difference(starts)
    return [sorted(indices) for _, indices in merged]


def _difference(tuples: list[list[Part]]) -> list[Part]:
    heap = [(-_spread(parts), at, parts) for at, parts in enumerate(tuples)]
    heapq.heapify(heap)
    at = len(heap)
    while len(heap) > 1:
        parts = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (-_spread(parts), at, parts))
        at += 1
    return heap[0][2]


def _merge(left: Sequence[Part], right: Sequence[Part]) -> list[Part]:
    rising = sorted(right, key=lambda part: part[0])
    falling = sorted(left, key=lambda part: -part[0])
    return [(a[0] + b[0], a[1] + b[1]) for a, b in zip(falling, rising, strict=True)]


def _spread(parts: Sequence[Part]) -> int:
    sums = [part[0] for part in parts]
    return max(sums) - min(sums)
