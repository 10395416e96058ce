"""Requests that wait for an engine: fair between classes, by priority within one.

Owns the order. Does not own the engines, nor the waiting itself.

The class that goes next is, of those that have somebody waiting, the one with the fewest requests in flight for its share. So
each class gets its share of all places whenever it wants it, what it does not use is lent to the others, and none starves: one
with nothing in flight goes before every other. A place that is lent comes back when its request ends; nothing is preempted.
Within a class the highest priority goes first, then the oldest; a request that lost its engine keeps its age.

    shares train 4, judge 2; in flight train 5, judge 1      next: judge (1/2 < 5/4)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Generic, TypeVar

from rondo.roles.engines.engine import Kind
from rondo.runtime.errors import ConfigError

Item = TypeVar("Item")

SHARES: Mapping[Kind, float] = {"train": 4.0, "judge": 2.0, "agent": 2.0, "evaluation": 1.0}
"""Parts of all places that each class is sure of. Judges and agents hold up the samples that wait for them."""


class FairQueue(Generic[Item]):
    """Pure. `began` and `ended` tell it what is in flight, whether it came through the queue or not."""

    def __init__(self, shares: Mapping[Kind, float]) -> None:
        if set(shares) != set(SHARES) or min(shares.values()) <= 0:
            raise ConfigError(
                f"shares must name {', '.join(SHARES)}, each above 0, got {dict(shares)}. A class without a share would starve"
            )
        self._shares = dict(shares)
        self._waiting: dict[Kind, list[tuple[int, int, Item]]] = {kind: [] for kind in shares}
        self._removed: set[int] = set()
        self._ages = itertools.count()
        self.in_flight: dict[Kind, int] = dict.fromkeys(shares, 0)
        self.num_waiting = 0

    def age(self) -> int:
        """A place in the order of arrival; a smaller one is older."""
        return next(self._ages)

    def add(self, kind: Kind, priority: int, age: int, item: Item) -> None:
        heapq.heappush(self._waiting[kind], (-priority, age, item))
        self.num_waiting += 1

    def remove(self, kind: Kind, age: int) -> None:
        """What was added with this age no longer waits. It must be waiting."""
        self._removed.add(age)
        self.num_waiting -= 1
        self._clean(self._waiting[kind])

    def began(self, kind: Kind) -> None:
        self.in_flight[kind] += 1

    def ended(self, kind: Kind) -> None:
        self.in_flight[kind] -= 1

    def pop(self) -> Item:
        """Takes out whose turn it is. Somebody must wait."""
        kind = min(
            (kind for kind, heap in self._waiting.items() if heap),
            key=lambda kind: self.in_flight[kind] / self._shares[kind],
        )
        item = heapq.heappop(self._waiting[kind])[2]
        self.num_waiting -= 1
        self._clean(self._waiting[kind])
        return item

    def all(self) -> list[Item]:
        """Everybody who waits, in no order."""
        return [item for heap in self._waiting.values() for _, age, item in heap if age not in self._removed]

    def _clean(self, heap: list[tuple[int, int, Item]]) -> None:
        """The first of a heap is always one that waits."""
        while heap and heap[0][1] in self._removed:
            self._removed.discard(heapq.heappop(heap)[1])
