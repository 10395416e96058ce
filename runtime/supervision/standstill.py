"""Standstill: a run in which nothing moves although everything lives. When that is, and who is to start again for it.

Owns the clock of progress and the order of what is tried. Pure: does not own starting again, which `supervision.py` does.

    nothing moves for `limit_s` -> stacks are dumped -> still nothing: turn 1, whose section stands longest
                                                                       turn 2, all role groups; turn 3, the whole run

Invariant: what moves, at any time, begins it all anew; while somebody starts, saves or has a limit of its own the clock stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rondo.runtime.supervision.heartbeat import Beat
from rondo.runtime.supervision.orders import Action, DumpStacks, Note


@dataclass(frozen=True, slots=True)
class Standing:
    """What is found when the stacks are written down. Nobody stands (`child` is None) where no section is open."""

    turn: int
    what: str
    child: str | None
    rank: int | None


class Standstill:
    """The watch over one run. Times in monotonic seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._moved_at = 0.0
        self._done: dict[str, int] = {}  # child -> things done by its living incarnation
        self._dumping = False
        self._turn = 0

    def begin(self, now: float) -> None:
        """Children start: the clock does too."""
        self._moved_at = now

    def started(self, child: str) -> None:
        """A new incarnation counts from zero."""
        self._done.pop(child, None)

    def slept(self, seconds: float) -> None:
        """Nobody looked for so long, and perhaps nobody ran."""
        self._moved_at += seconds

    def moved(self, now: float) -> None:
        self._moved_at, self._dumping, self._turn = now, False, 0

    def watch(self, now: float, beats: Mapping[str, Sequence[Beat]], *, all_up: bool) -> list[Action]:
        """Whether anything moves. Who starts, saves or has a limit of its own is waited for."""
        moved = waited_for = False
        for child, seen in beats.items():
            done, before = sum(beat.progress for beat in seen), self._done.get(child, 0)
            moved |= done > before
            self._done[child] = max(done, before)
            waited_for |= any(beat.patient for beat in seen)
        if moved:
            self.moved(now)
        elif waited_for or not all_up:
            self._moved_at = now
        if now - self._moved_at <= self._limit_s:
            return []
        seconds, self._moved_at, self._dumping = now - self._moved_at, now, True
        return [Note("no_progress", {"seconds": seconds}), DumpStacks()]

    def dumped(self, now: float, beats: Mapping[str, Sequence[Beat]]) -> Standing | None:
        """All stacks are written down: the next turn, with who stands longest of those whose `beats` are given; None where
        something has moved meanwhile."""
        if not self._dumping:
            return None
        self._dumping = False
        self._turn += 1
        what = f"no progress for {self._limit_s:g} s"
        standing = [
            (beat.section_since_s, child, beat)
            for child, seen in beats.items()
            for beat in seen
            if beat.section_since_s > 0
        ]
        if not standing:
            return Standing(self._turn, what, None, None)
        since, child, beat = min(standing, key=lambda each: each[0])
        what += f"; section {beat.section!r} stands for {now - since:.0f} s" if self._turn == 1 else ""
        return Standing(self._turn, what, child, beat.rank)
