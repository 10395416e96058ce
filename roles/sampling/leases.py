"""Which of a replica's prompt groups have come further since it was last asked: their leases are renewed, and no others.

Owns what counts as progress of a group: its media, a sample of it that ends, its reward, what its workflow says, what a sample
waits for beside the engine, and what the engine tells of its own requests; a reward that is computed, for as long as one may
take. Makes no call: `roles/rollout.py` asks before each renewal.

    progress.begin(key)                     # a lease, [group, epoch]
    with progress.generating(key, id): ...  # this request of it is at the engine
    with progress.elsewhere(key): ...       # a sample of it waits for an environment, a tool or a program
    with progress.scoring(key): ...         # its samples are with the reward
    progress.since_last(requests, scored)   # the keys that have come further: `Engine.progress()`, and counters of the rewards

Invariant: a group comes further by what is its own. While it waits behind others for a slot or a reward worker it does when they
do. One whose last request hangs does not, whatever others do; nor does one whose reward hangs, beyond its deadline and with
nothing else scored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Key = tuple[int, int]
"""Group, epoch."""


class Progress:
    """Of the leases that one replica holds. `reward_s`: the longest time that one reward may take."""

    def __init__(
        self, reward_s: float, clock: Callable[[], float] = time.monotonic, left: Callable[[], None] = lambda: None
    ) -> None:
        """left: called when a sample leaves the engine to others."""
        self._reward_s, self._left = reward_s, left
        self._clock = clock
        self._held: set[Key] = set()
        self._moved: set[Key] = set()  # since the last call
        self._preparing: dict[Key, None] = {}
        self._generating: dict[str, Key] = {}
        self._elsewhere, self._made = Counter[Key](), Counter[Key]()
        self.num_away = 0
        """Samples of the held groups that need nothing of the engine, for now or any more."""
        self._scoring: dict[Key, float] = {}
        self._requests: Mapping[str, int] = {}
        self._scored: Hashable = None
        self._scored_at = clock()

    def begin(self, key: Key) -> None:
        self._held.add(key)
        self._moved.add(key)

    def further(self, key: Key) -> None:
        """The group has come further in what nobody here sees, such as a step of an environment."""
        self._moved.add(key)

    def made(self, key: Key, num_samples: int) -> None:
        """So many more samples of the group are whole."""
        self._made[key] += num_samples
        self.num_away += num_samples
        self._left()

    def end(self, key: Key) -> None:
        self._held.discard(key)
        self._moved.discard(key)
        self.num_away -= self._made.pop(key, 0)
        self._left()

    @contextmanager
    def _while(self, key: Key, held: MutableMapping[Any, Any], name: Any, value: Any) -> Iterator[None]:
        """What the group comes further by is `held` while the body runs."""
        held[name] = value
        try:
            yield
            self._moved.add(key)
        finally:
            del held[name]

    def preparing(self, key: Key) -> AbstractContextManager[None]:
        """The group's prompt is made while the body runs, which has deadlines of its own."""
        return self._while(key, self._preparing, key, None)

    def generating(self, key: Key, request_id: str) -> AbstractContextManager[None]:
        """This request of the group is at the engine while the body runs."""
        return self._while(key, self._generating, request_id, key)

    def scoring(self, key: Key) -> AbstractContextManager[None]:
        """Samples of the group are with the reward while the body runs."""
        return self._while(key, self._scoring, key, self._clock())

    @contextmanager
    def elsewhere(self, key: Key) -> Iterator[None]:
        """A sample of the group waits beside the engine while the body runs, for what has deadlines of its own."""
        self._elsewhere[key] += 1
        self.num_away += 1
        self._left()
        try:
            yield
            self._moved.add(key)
        finally:
            self._elsewhere[key] -= 1
            self.num_away -= 1

    def since_last(self, requests: Mapping[str, int], scored: Any) -> list[Key]:
        """The groups that have come further since the last call. requests: as `Engine.progress` tells them; scored: counters of
        the rewards."""
        now = self._clock()
        before, self._requests = self._requests, requests
        if scored != self._scored:
            self._scored, self._scored_at = scored, now
        moved, self._moved = self._moved, set()
        moved |= self._preparing.keys()
        self._elsewhere = +self._elsewhere
        moved |= self._elsewhere.keys()
        moved |= {key for name, key in self._generating.items() if requests.get(name) != before.get(name)}
        moved |= {key for key, at in self._scoring.items() if now - max(at, self._scored_at) <= self._reward_s}
        return sorted(moved & self._held)
