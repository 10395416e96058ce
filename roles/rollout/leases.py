"""Which of a replica's prompt groups have come further since it was last asked: their leases are renewed, and no others.

Owns what counts as progress of a group: a sample of it that ends, its reward, and tokens of its engine while it has requests
there; a reward that is computed, for as long as one may take. Makes no call: `role.py` asks before each renewal.

    progress.begin(key)                 # a lease, [group, epoch]
    with progress.generating(key): ...  # a request of it is at the engine
    with progress.scoring(key): ...     # its samples are with the reward
    progress.since_last(tokens, scored) # the keys that have come further, by these counters of engine and rewards

Invariant: a group that waits behind others for a slot or a reward worker has come further when they have; one whose reward hangs,
beyond its deadline and with nothing else scored, has not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

Key = tuple[int, int]
"""Group, epoch."""


class Progress:
    """Of the leases that one replica holds. `reward_s`: the longest time that one reward may take."""

    def __init__(self, reward_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reward_s = reward_s
        self._clock = clock
        self._held: set[Key] = set()
        self._moved: set[Key] = set()  # since the last call
        self._generating: Counter[Key] = Counter()
        self._scoring: dict[Key, float] = {}
        self._tokens: Hashable = None
        self._scored: Hashable = None
        self._scored_at = clock()

    def begin(self, key: Key) -> None:
        self._held.add(key)
        self._moved.add(key)

    def end(self, key: Key) -> None:
        self._held.discard(key)
        self._moved.discard(key)

    @contextmanager
    def generating(self, key: Key) -> Iterator[None]:
        """A request of the group is at the engine while the body runs."""
        self._generating[key] += 1
        try:
            yield
            self._moved.add(key)
        finally:
            self._generating[key] -= 1
            if not self._generating[key]:
                del self._generating[key]

    @contextmanager
    def scoring(self, key: Key) -> Iterator[None]:
        """Samples of the group are with the reward while the body runs."""
        self._scoring[key] = self._clock()
        try:
            yield
            self._moved.add(key)
        finally:
            del self._scoring[key]

    def since_last(self, tokens: Any, scored: Any) -> list[Key]:
        """The groups that have come further since the last call. tokens: counters of the engine that grow while it generates;
        scored: those of the rewards."""
        now = self._clock()
        streams, self._tokens = tokens != self._tokens, tokens
        if scored != self._scored:
            self._scored, self._scored_at = scored, now
        moved, self._moved = self._moved, set()
        if streams:
            moved |= self._generating.keys()
        moved |= {key for key, at in self._scoring.items() if now - max(at, self._scored_at) <= self._reward_s}
        return sorted(moved & self._held)
