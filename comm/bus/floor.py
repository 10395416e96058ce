"""The floor: the fewest healthy engines that a run goes on with, over all replicas.

Owns what every rollout process told last of its engines, and when that has been too few for too long. Pure: the clock is passed
in. Not journalled: processes tell again every few seconds, so a new coordinator knows it as soon as they do.

    above -- fewer than `least` --> below -- `deadline_s` later --> given up: as the settings say, once
      ^                               |
      +---------- enough again -------+

Above it a run goes on with what there is. Nothing is counted before the first process has told of its engines: until then their
start has a deadline of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Report = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Told:
    """Engines that serve proved weights, or are being given them, of all that a process, or a run, has."""

    healthy: int = 0
    of: int = 0


class Floor:
    """`then`: what follows when too few are healthy for `deadline_s` seconds: "stop" saves and leaves, "fail" ends the run."""

    def __init__(self, least: int, deadline_s: float, then: str) -> None:
        self.least, self.deadline_s, self._then = least, deadline_s, then
        self._told: dict[tuple[str, int], Told] = {}
        self._begun = False
        self._since: float | None = None
        self._given_up = False

    def tell(self, member: str, rank: int, healthy: int, of: int) -> None:
        self._begun = True
        self._told[member, rank] = Told(healthy, of)

    def forget(self, member: str) -> None:
        """It is proved dead."""
        self._told = {key: told for key, told in self._told.items() if key[0] != member}

    @property
    def engines(self) -> Told:
        return Told(sum(each.healthy for each in self._told.values()), sum(each.of for each in self._told.values()))

    @property
    def why(self) -> str:
        """Empty above the floor."""
        found = self.engines
        return (
            f"{found.healthy} of {found.of} engines are healthy, {self.least} must be"
            if self._since is not None
            else ""
        )

    def look(self, now: float) -> list[Report]:
        """What is to be told since the last look, and done: "engines_below", "engines_back", then "stop" or "fatal"."""
        healthy, of = self.engines.healthy, self.engines.of
        if not self._begun or healthy >= self.least:
            since, self._since, self._given_up = self._since, None, False
            return [] if since is None else [("engines_back", {"healthy": healthy, "of": of, "after_s": now - since})]
        if self._since is None:
            self._since = now
            left = {"least": self.least, "deadline_s": self.deadline_s, "then": self._then}
            return [("engines_below", {"healthy": healthy, "of": of, **left})]
        if self._given_up or now - self._since < self.deadline_s:
            return []
        self._given_up = True
        cause = f"{self.why} (rollout.min_engines), for {self.deadline_s:g} s. Repair or attach engines, then go on"
        return [("stop", {"reason": cause}) if self._then == "stop" else ("fatal", {"cause": cause})]
