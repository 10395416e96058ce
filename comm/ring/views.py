"""The rings that a process has open: those that it reads, and those that it writes.

Owns opening them by name and letting them go. Does not own what lies inside (`ring.py`), nor which of them are still needed.

    with Views(segments) as views:
        views["ring/rollout-0/0"].read(pos, seq)      # mapped at its first use
        views.keep(named.__contains__)                # the others are let go

Invariant: what is let go is closed once; arrays that somebody still holds keep their memory mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Generic, Protocol, Self, TypeVar

from rondo.comm.ring.ring import RingLog, RingView, RingWriter
from rondo.runtime.memory.segments import Segment

Side = TypeVar("Side", bound=RingLog)


class Segments(Protocol):
    """Where memory and doorbells are found by name (`runtime.memory.segments.SegmentClient`)."""

    def segment(self, name: str, num_bytes: int) -> Segment: ...
    def doorbell(self, name: str) -> int: ...
    def drop(self, name: str) -> None: ...


class _Open(Generic[Side]):
    """Rings by name, each from its first use until it is let go. To be used by one thread at a time."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._rings: dict[str, tuple[Side, ExitStack]] = {}

    def __getitem__(self, ring: str) -> Side:
        """Raises NoSuchSegment for a ring that was taken away."""
        if ring not in self._rings:
            with ExitStack() as opened:
                side = self._side(ring, opened)
                opened.callback(side.close)
                self._rings[ring] = side, opened.pop_all()
        return self._rings[ring][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rings)

    def _side(self, ring: str, opened: ExitStack) -> Side:
        raise NotImplementedError

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Let go of every ring that is not wanted."""
        for ring in [ring for ring in self._rings if not wanted(ring)]:
            self._rings.pop(ring)[1].close()

    def close(self) -> None:
        self.keep(lambda _: False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Views(_Open[RingView]):
    """Rings mapped read-only."""

    def _side(self, ring: str, opened: ExitStack) -> RingView:
        return RingView(opened.enter_context(self._segments.segment(ring, 0)), ring)


class Writers(_Open[RingWriter]):
    """Rings whose one producer this process is, each with its doorbell."""

    def _side(self, ring: str, opened: ExitStack) -> RingWriter:
        segment, doorbell = opened.enter_context(self._segments.segment(ring, 0)), self._segments.doorbell(ring)
        opened.callback(os.close, doorbell)
        return RingWriter(segment, doorbell, ring)

    def prefer(self, ring: str) -> None:
        """It comes last from now on: whoever puts into any of several tries the last one first."""
        self._rings[ring] = self._rings.pop(ring)
