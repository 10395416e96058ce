"""All rings of a run as the coordinator holds them: their tails, their doorbells, and the puts that became visible.

Owns the coordinator's side of shared memory, and turns new records into put events. Does not own who may use how much of a
ring (`space.py`), the journal, or what a put means (`index.py`).

    producer stores the head, rings -> the doorbell wakes the loop -> drained, then the head loaded -> put events -> `seen`

Invariant: every record becomes one put event, in the order of its ring; the doorbell is drained before the head is loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rondo.comm.journal import Event
from rondo.comm.partitions.fold import put_event
from rondo.comm.partitions.memory import Memories
from rondo.comm.partitions.shelf import Ring
from rondo.comm.records import Descriptor
from rondo.comm.ring import RecordRef, RingTail
from rondo.comm.space import RingSpace
from rondo.comm.spans import num_rows
from rondo.comm.words import PEEK_IS_SAFE, drain
from rondo.runtime.segments import Segment, SegmentClient


@dataclass(slots=True)
class _Ring:
    tail: RingTail
    doorbell: int
    segment: Segment

    def news(self) -> bool:
        """Whether there is something to read; a look costs no system call where a look is enough."""
        return not PEEK_IS_SAFE or self.tail.head > self.tail.cursor


class Rings:
    """Lives on a running event loop. `seen` gets the put events of a ring whose doorbell was rung."""

    def __init__(self, segments: SegmentClient | Memories, seen: Callable[[list[Event]], None]) -> None:
        self._segments = segments
        self._seen = seen
        self._rings: dict[str, _Ring] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._rings

    def open(self, name: str, num_bytes: int = 0, known: RingSpace | Ring | None = None) -> int:
        """Listen to a ring; its capacity in bytes. `known`: how far it was read and released before this process."""
        segment = self._segments.segment(name, num_bytes)
        tail = RingTail(segment, name, cursor=known.head if known else None)
        if known is not None:
            tail.release(known.tail)
        ring = self._rings[name] = _Ring(tail, self._segments.doorbell(name), segment)
        asyncio.get_running_loop().add_reader(ring.doorbell, self._rung, name)
        return tail.capacity

    def read(self, names: Iterable[str]) -> list[Event]:
        """Put events of all records that nobody has seen yet."""
        return [event for name in names if self._rings[name].news() for event in self._read(name)]

    def release(self, name: str, tail: int) -> None:
        """Let the producer overwrite everything before `tail`."""
        if name in self._rings:
            self._rings[name].tail.release(tail)

    def drop(self, name: str) -> None:
        """Take a ring away for good."""
        self._shut(name)
        self._segments.drop(name)

    def discard(self, name: str) -> None:
        """Forget the memory of a name that no ring has."""
        if name not in self._rings:
            self._segments.drop(name)

    def close(self) -> None:
        """Stop listening; memory stays where it is."""
        for name in list(self._rings):
            self._shut(name)

    def _rung(self, name: str) -> None:
        events = self._read(name)
        if events:
            self._seen(events)

    def _read(self, name: str) -> list[Event]:
        ring = self._rings[name]
        drain(ring.doorbell)
        return [_put_event(name, ref, descriptor) for ref, descriptor in ring.tail.poll()]

    def _shut(self, name: str) -> None:
        ring = self._rings.pop(name)
        asyncio.get_running_loop().remove_reader(ring.doorbell)
        ring.tail.close()
        ring.segment.close()
        os.close(ring.doorbell)


def _put_event(ring: str, ref: RecordRef, descriptor: Descriptor) -> Event:
    meta = descriptor.meta
    if "part" in meta:
        return put_event(
            ring,
            ref.pos,
            ref.seq,
            ref.num_bytes,
            [c.name for c in descriptor.columns],
            num_rows(descriptor.spans),
            meta,
        )
    event = {
        "event": "put", "ring": ring, "pos": ref.pos, "seq": ref.seq, "bytes": ref.num_bytes,
        "spans": descriptor.spans,
        "columns": [column.name for column in descriptor.columns], "epoch": descriptor.epoch,
        "attempt": descriptor.attempt, "reservation": meta["reservation"], "entries": num_rows(descriptor.spans),
    }  # fmt: skip
    return event | ({"info": meta["info"]} if "info" in meta else {})
