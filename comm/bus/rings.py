"""All rings of a run as the coordinator holds them: their tails, their doorbells, and the puts that became visible.

Owns the coordinator's side of shared memory, and turns new records into put events. Does not own who may use how much of a
ring (`space.py`), the journal, or what a put means (`index.py`).

    producer stores the head, rings -> the doorbell wakes the loop -> drained, then the head loaded -> put events -> `seen`

Large memory takes seconds to make, which the loop does not wait for: a thread makes it, `made` is called, and who needed it asks
again. All who ask for one producer meanwhile wait for the same.

Invariant: every record becomes one put event, in the order of its ring; the doorbell is drained before the head is loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rondo.comm.bus.journal import Event
from rondo.comm.bus.space import RingSpace
from rondo.comm.ring.records import Descriptor
from rondo.comm.ring.ring import RecordRef, RingTail
from rondo.comm.ring.views import Segments
from rondo.comm.ring.words import PEEK_IS_SAFE, drain
from rondo.runtime.memory.segments import QUICK_BYTES, Segment


@dataclass(slots=True)
class _Ring:
    tail: RingTail
    doorbell: int
    segment: Segment

    def news(self, once_more: bool) -> bool:
        """Whether there is something to read, by the rule of `words.py`; no system call where a look is enough."""
        if PEEK_IS_SAFE and self.tail.head == self.tail.cursor:
            return False
        return drain(self.doorbell) > 0 or PEEK_IS_SAFE or once_more


@dataclass(frozen=True, slots=True)
class _Making:
    """Memory for a producer's next ring, on its way or there."""

    name: str
    num_bytes: int
    task: asyncio.Task[Segment]


class Rings:
    """Lives on a running event loop. `seen` gets the put events of a ring whose doorbell was rung, `made` is called when memory
    `prepare` had not got is there, or cannot be had; `put_event` makes an event of a record."""

    def __init__(
        self,
        segments: Segments,
        seen: Callable[[list[Event]], None],
        made: Callable[[], None],
        put_event: Callable[[RecordRef, Descriptor], Event],
    ) -> None:
        self._segments = segments
        self._put_event = put_event
        self._seen = seen
        self._made = made
        self._rings: dict[str, _Ring] = {}
        self._making: dict[str, _Making] = {}  # by producer

    def __contains__(self, name: str) -> bool:
        return name in self._rings

    def prepare(self, producer: str, name: str, num_bytes: int, *, fresh: bool = False) -> str | None:
        """The name under which `open` finds so much memory for a ring of this producer: `name`, or that of memory that it was
        prepared before; None while it is made. `fresh`: a coordinator that died may have left other memory under `name`.

        Raises what making it raised, once: OutOfSpace, TimeoutError past its deadline ("handover segment"), PeerGone.
        """
        making = self._making.get(producer)
        if making is not None and making.task.done() and (making.task.exception() or making.num_bytes < num_bytes):
            del self._making[producer]
            making.task.result().close()
            self._segments.drop(making.name)
            making = None
        if making is None:
            if fresh:
                self._segments.drop(name)
            if num_bytes <= QUICK_BYTES:
                return name
            task = asyncio.ensure_future(asyncio.to_thread(self._segments.segment, name, num_bytes))
            making = self._making[producer] = _Making(name, num_bytes, task)
            task.add_done_callback(self._is_made)
        return making.name if making.task.done() else None

    async def make(self, name: str, num_bytes: int) -> None:
        """Waits until `open` finds the memory of a ring that is its producer's only one. Raises as `prepare`."""
        while name not in self._rings and self.prepare(name, name, num_bytes) is None:
            await asyncio.wait([self._making[name].task])

    def give_up(self, producer: str) -> None:
        """What was prepared for this producer, if anything is there, is not needed."""
        making = self._making.get(producer)
        if making is not None and making.task.done():
            del self._making[producer]
            self._return(making.name, making.task)

    def forget(self, prefix: str) -> None:
        """Producers whose names begin so are gone for good."""
        for producer in [producer for producer in self._making if producer.startswith(prefix)]:
            making = self._making.pop(producer)
            making.task.add_done_callback(partial(self._return, making.name))

    def _return(self, name: str, task: asyncio.Task[Segment]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().close()
            self._segments.drop(name)

    def _is_made(self, task: asyncio.Task[Segment]) -> None:
        if not task.cancelled():
            task.exception()  # `prepare` raises it, if somebody asks
            self._made()

    def open(self, name: str, num_bytes: int = 0, known: RingSpace | None = None) -> int:
        """Listen to a ring; its capacity in bytes. `known`: how far it was read and released before this process."""
        segment = self._prepared(name) or self._segments.segment(name, num_bytes)
        tail = RingTail(segment, name, cursor=known.head if known else None)
        if known is not None:
            tail.release(known.tail)
        ring = self._rings[name] = _Ring(tail, self._segments.doorbell(name), segment)
        asyncio.get_running_loop().add_reader(ring.doorbell, self._rung, name)
        return tail.capacity

    def read(self, names: Iterable[str], *, once_more: bool = False) -> list[Event]:
        """Put events of all records that have rung and nobody has seen yet. once_more: also of those that have not, or whose
        doorbell a coordinator drained that is dead; at its successor's start, and when the producer is dead."""
        return [event for name in names if self._rings[name].news(once_more) for event in self._read(name)]

    def release(self, name: str, tail: int) -> None:
        """Let the producer overwrite everything before `tail`."""
        if name in self._rings:
            self._rings[name].tail.release(tail)

    def drop(self, name: str) -> None:
        """Take a ring away for good."""
        self._shut(name)
        self._segments.drop(name)

    def close(self) -> None:
        """Stop listening; memory stays where it is."""
        for making in self._making.values():
            making.task.cancel()
        for name in list(self._rings):
            self._shut(name)

    def _prepared(self, name: str) -> Segment | None:
        producer = next((producer for producer, making in self._making.items() if making.name == name), None)
        return self._making.pop(producer).task.result() if producer is not None else None

    def _rung(self, name: str) -> None:
        events = self._read(name) if drain(self._rings[name].doorbell) or PEEK_IS_SAFE else []
        if events:
            self._seen(events)

    def _read(self, name: str) -> list[Event]:
        return [self._put_event(ref, descriptor) for ref, descriptor in self._rings[name].tail.poll()]

    def _shut(self, name: str) -> None:
        ring = self._rings.pop(name)
        asyncio.get_running_loop().remove_reader(ring.doorbell)
        ring.tail.close()
        ring.segment.close()
        os.close(ring.doorbell)
