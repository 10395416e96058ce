"""A circuit breaker: when an engine that fails is left alone, and when it is tried again.

Owns the three states and their times, as a pure fold over what it is told. Does not own what a failure is, nor the clock: every
event brings its time. What must never exist: an open breaker that closes without a success.

    closed --`failures` in a row, or one that is fatal--> open --open_s later--> half-open --success--> closed
                                                           ^                         |
                                                           +----- any failure, twice as long (`longest_open_s` at most)

Half-open lets one request through at a time; whoever asks for more is told there is no room. An engine that has a probe of its
own needs no such trial to be seen `recovered`.
"""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Of one engine. Times are seconds on one monotonic clock."""

    __slots__ = ("_failures", "_first_open_s", "_in_a_row", "_longest_open_s", "_open_s", "_until", "why")

    def __init__(self, *, failures: int, open_s: float, longest_open_s: float) -> None:
        self._failures = failures
        self._first_open_s = self._open_s = open_s
        self._longest_open_s = longest_open_s
        self._in_a_row = 0
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

    def admits(self, now: float, num_in_flight: int) -> bool:
        """Whether one more request may begin beside those in flight."""
        return self._until is None or (now >= self._until and num_in_flight == 0)

    def opens_for_s(self, now: float) -> float:
        """Seconds until it is tried again; 0 unless it is open."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def recovered(self) -> None:
        """An engine that was gone has answered its probe, or taken weights and proved them: that was the trial."""
        self._in_a_row = 0
        self._until = None
        self._open_s = self._first_open_s

    def succeeded(self, now: float) -> None:
        """A success closes it, unless it is open: then it is of something that began before."""
        self._in_a_row = 0
        if self._until is not None and now >= self._until:
            self._until = None
            self._open_s = self._first_open_s

    def failed(self, now: float, why: str, *, fatal: bool = False) -> bool:
        """Whether this failure opened it. `fatal`: the engine is known to be gone."""
        self.why = why
        self._in_a_row += 1
        state = self.state(now)
        if state == "open" or (state == "closed" and not fatal and self._in_a_row < self._failures):
            return False
        if state == "half-open":
            self._open_s = min(2 * self._open_s, self._longest_open_s)
        self._until = now + self._open_s
        return True
