"""Intervals of time, as sorted lists of (start, end) that do not touch. Integers; pure.

length(intersect(union(busy), [(begin, end)]))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, without overlap, without empty ones."""
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What lies in both; both as `union` gives them."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What of `one` lies outside of `other`; both as `union` gives them."""
    if not (one and other):
        return list(one)
    ends = [one[0][0], *(end for _, end in other)]
    starts = [*(start for start, _ in other), one[-1][1]]
    return intersect(one, list(zip(ends, starts, strict=True)))


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
