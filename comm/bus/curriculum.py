"""Which rows rest: those whose prompts the policy has solved, or has not come near, for some steps.

Owns what is remembered of rows, and who rests at a step. Does not own which row comes next (`lookahead.py`).

    a row is solved at step 12 of a run that is at most 1 version stale; rest_steps 20        rests at the steps 14 to 33

Pure, and a part of the index's fold. Invariant: whether a row rests at step k is a function of the groups of the steps before
k - max_staleness, all of which are committed before a lease for k is granted; so nothing depends on who is quicker.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("solved", "hopeless")


@dataclass(frozen=True, slots=True)
class Rests:
    """Of the part of samples whose reward is at least `solved_from`: from `solved` on, and up to `hopeless`, a row rests."""

    steps: int
    solved: float | None
    hopeless: float | None
    solved_from: float


class Curriculum:
    """What was judged, as far back as it can keep a row at rest."""

    def __init__(self, rests: Rests, max_staleness: int, judged: Iterable[Sequence[Any]] = ()) -> None:
        self._rests, self._stale = rests, max_staleness
        self._of: dict[
            tuple[str, int], list[tuple[int, int, str]]
        ] = {}  # source, row -> step, group, one of KINDS or ""
        for source, row, *told in judged:
            self._of.setdefault((source, row), []).append(tuple(told))

    def judge(self, step: int, group: int, source: str, row: int, rewards: Sequence[float | None]) -> None:
        """What a prompt group of a step says of its row."""
        scored = [reward for reward in rewards if reward is not None]
        if not scored:
            return
        of, rate = self._rests, sum(reward >= self._rests.solved_from for reward in scored) / len(scored)
        solved = of.solved is not None and rate >= of.solved
        kind = "solved" if solved else "hopeless" if of.hopeless is not None and rate <= of.hopeless else ""
        if kind or (source, row) in self._of:
            bisect.insort(self._of.setdefault((source, row), []), (step, group, kind))

    def forget(self, step: int) -> None:
        """Steps from this one on alone are asked of."""
        self._of = {key: told for key, told in self._of.items() if self._end(told[-1][0]) > step}

    def wake(self, step: int, source: str) -> None:
        """Of the rows of a source that rest at a step, the half that has rested longest does no more."""
        since = sorted((at, row) for (of, row), at, _ in self._resting(step) if of == source)
        for _, row in since[: -(-len(since) // 2)]:
            del self._of[source, row]

    def why(self, step: int, source: str, row: int) -> str:
        """As what a row rests at a step, one of KINDS; "" while it is awake."""
        return self._judgement(step, self._of.get((source, row), []))[1]

    def num_resting(self, step: int) -> dict[str, int]:
        return dict.fromkeys(KINDS, 0) | dict(Counter(kind for *_, kind in self._resting(step)))

    def judged(self) -> list[list[Any]]:
        """All of its state."""
        return [[*key, *each] for key, told in self._of.items() for each in told]

    def _end(self, judged: int) -> int:
        """The first step at which a row that was judged at one is awake again."""
        return judged + self._stale + self._rests.steps + 1

    def _judgement(self, step: int, told: list[tuple[int, int, str]]) -> tuple[int, str]:
        """(step, kind) of the newest judgement that counts at a step; "" for none."""
        found = ((at, kind) for at, _, kind in reversed(told) if at < step - self._stale)
        at, kind = next(found, (0, ""))
        return at, kind if step < self._end(at) else ""

    def _resting(self, step: int) -> list[tuple[tuple[str, int], int, str]]:
        """(source and row, step of the judgement, kind) of those that rest at a step."""
        every = ((key, *self._judgement(step, told)) for key, told in self._of.items())
        return [each for each in every if each[2]]
