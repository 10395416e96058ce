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
    left: list[Interval] = []
    j = 0
    for start, end in one:
        at = start
        while j < len(other) and other[j][1] <= at:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > at:
                left.append((at, other[k][0]))
            at = max(at, other[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
