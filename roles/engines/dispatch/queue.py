"""Requests that wait for an engine: fair between classes, by priority within one.

Owns the order. Does not own the engines, nor the waiting itself.

The class that goes next is, of those that have somebody waiting, the one with the fewest requests in flight for its share. So
each class gets its share of all places whenever it wants it, what it does not use is lent to the others, and none starves: one
with nothing in flight goes before every other. A place that is lent comes back when its request ends; nothing is preempted.
Within a class the highest priority goes first, then the oldest; a request that lost its engine keeps its age.

    shares train 4, judge 2; in flight train 5, judge 1      next: judge (1/2 < 5/4)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from typing import Generic, TypeVar

from rondo.roles.engines.engine import Kind

Item = TypeVar("Item")

SHARES: Mapping[Kind, float] = {"train": 4.0, "judge": 2.0, "agent": 2.0, "evaluation": 1.0}
"""Parts of all places that each class is sure of. Judges and agents hold up the samples that wait for them."""


class FairQueue(Generic[Item]):
    """Pure. `began` and `ended` tell it what is in flight, whether it came through the queue or not."""

    def __init__(self) -> None:
        self._waiting: dict[Kind, list[tuple[int, int, Item]]] = {kind: [] for kind in SHARES}  # in their order
        self._ages = itertools.count()
        self.in_flight: dict[Kind, int] = dict.fromkeys(SHARES, 0)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def age(self) -> int:
        """A place in the order of arrival; a smaller one is older."""
        return next(self._ages)

    def add(self, kind: Kind, priority: int, age: int, item: Item) -> None:
        bisect.insort(self._waiting[kind], (-priority, age, item))

    def remove(self, kind: Kind, priority: int, age: int) -> None:
        """What was added so no longer waits. It must be waiting."""
        waiting = self._waiting[kind]
        del waiting[bisect.bisect(waiting, (-priority, age), key=lambda each: each[:2]) - 1]

    def began(self, kind: Kind) -> None:
        self.in_flight[kind] += 1

    def ended(self, kind: Kind) -> None:
        self.in_flight[kind] -= 1

    def pop(self) -> Item:
        """Takes out whose turn it is. Somebody must wait."""
        kind = min(
            (kind for kind, waiting in self._waiting.items() if waiting),
            key=lambda kind: self.in_flight[kind] / SHARES[kind],
        )
        return self._waiting[kind].pop(0)[2]

    def all(self) -> list[Item]:
        """Everybody who waits."""
        return [item for waiting in self._waiting.values() for _, _, item in waiting]
