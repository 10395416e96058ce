"""A circuit breaker: when an engine that answers and fails is given a rest, and when it is tried again.

Owns the three states and their times, as a pure fold over what it is told. Does not own what a failure is (`faults.py`), nor the
clock: every event brings its time. What an engine has in flight goes on while it rests.

    closed --`failures` requests in a row, or it is full--> open --open_s later--> half-open --trial ends well--> closed
       ^                                                     ^                         |
       +------ any request ends well, whenever it began -----+ the trial fails --------+

Each rest without a request that ended well before it is twice as long as the last one, up to `longest_open_s`, and differs by a
quarter by chance, so that many engines are not tried at once. Half-open admits nobody: one token is asked for, which costs as
much as a probe (`fleet.py`), and then all is as before.
"""

from __future__ import annotations

import random
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Of one engine. Times are seconds on one monotonic clock."""

    __slots__ = ("_chance", "_failing", "_failures", "_longest_open_s", "_num_rests", "_open_s", "_until", "why")

    def __init__(self, *, failures: int, open_s: float, longest_open_s: float, chance: random.Random) -> None:
        self._failures = failures
        self._open_s, self._longest_open_s = open_s, longest_open_s
        self._chance = chance
        self._failing: set[str] = set()
        self._num_rests = 0
        self._until: float | None = None  # None: closed
        self.why = ""
        """The newest failure, in words."""

    @property
    def closed(self) -> bool:
        return self._until is None

    def state(self, now: float) -> State:
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half-open"

    def rests_s(self, now: float) -> float:
        """Seconds until it is tried again; 0 unless it is open."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def fails_only(self, request_id: str) -> bool:
        """Whether nothing but this request failed since one ended well."""
        return self._failing <= {request_id}

    def recovered(self) -> None:
        """Its trial ended well, or it has taken weights and proved them."""
        self._until = None
        self._failing.clear()

    def succeeded(self) -> None:
        """A request ended well."""
        self.recovered()
        self._num_rests = 0

    def failed(self, now: float, request_id: str, why: str, *, full: bool = False) -> None:
        """A request did, or a trial."""
        self.why = why
        self._failing.add(request_id)
        state = self.state(now)
        if state == "open" or (state == "closed" and not full and len(self._failing) < self._failures):
            return
        pause_s = min(self._open_s * 2 ** min(self._num_rests, 32), self._longest_open_s)
        self._num_rests += 1
        self._until = now + pause_s * self._chance.uniform(0.75, 1.25)
