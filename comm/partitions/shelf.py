"""The memory under a partition: its rings, the records in them, and how many rows still need each.

Owns the arithmetic of that, a part of the fold; bytes are laid by `ring.py`, tails are moved by the service. Every ring has
one producer, and nobody else promises its room, so the producer sees by itself, in the ring's words, what it may put: no
reservation is made for a put, and one ring taken serves as many puts as fit.

    ring "p/3/0"   tail v                                    head v
                   | record 7, 2 uses | record 8, none | record 9, 64 uses |
    unuse(7, 2) -> the tail moves behind record 8

Invariant: a record's memory is given back when nothing uses it and nothing older in its ring is used; each operation costs
as much as it touches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rondo.comm.ring.ring import ring_bytes


@dataclass(slots=True)
class Ring:
    """One ring; positions are log offsets in bytes that only grow."""

    capacity: int
    member: str
    rank: int
    spilled: bool = False  # its memory is a file
    head: int = 0
    tail: int = 0
    order: deque[tuple[int, int]] = field(default_factory=deque)  # (record, its end), oldest first


@dataclass(slots=True)
class Source:
    """Where a record lies, and how many rows have values in it."""

    ring: str
    pos: int
    seq: int
    num_bytes: int
    uses: int


class Shelf:
    def __init__(self) -> None:
        self.rings: dict[str, Ring] = {}
        self.sources: dict[int, Source] = {}
        self.live_bytes = 0  # of records in use
        self.ring_bytes = 0  # memory of all rings that are not files
        self.next_ring = 0
        self.num_dropped = 0  # rings taken away so far: readers look again when it changes
        self.freed: list[tuple[str, int]] = []

    def add(self, name: str, ring: Ring) -> None:
        self.rings[name] = ring
        self.next_ring += 1
        self.ring_bytes += 0 if ring.spilled else ring_bytes(ring.capacity)

    def remove(self, name: str) -> None:
        """An empty ring is gone."""
        ring = self.rings.pop(name)
        self.ring_bytes -= 0 if ring.spilled else ring_bytes(ring.capacity)
        self.num_dropped += 1

    def of(self, member: str, rank: int | None = None) -> list[str]:
        """The rings of one producer, or of all ranks of a member."""
        return [
            name for name, ring in self.rings.items() if ring.member == member and (rank is None or ring.rank == rank)
        ]

    def record(self, num: int, ring: str, pos: int, seq: int, num_bytes: int, uses: int) -> None:
        """A record became visible and `uses` rows have values in it."""
        held = self.rings[ring]
        held.head = pos + num_bytes
        held.order.append((num, held.head))
        if uses:
            self.sources[num] = Source(ring, pos, seq, num_bytes, uses)
            self.live_bytes += num_bytes
        else:
            self._trim(ring)

    def unuse(self, num: int, rows: int) -> None:
        """So many rows need a record no more."""
        source = self.sources[num]
        source.uses -= rows
        if not source.uses:
            del self.sources[num]
            self.live_bytes -= source.num_bytes
            self._trim(source.ring)

    def _trim(self, name: str) -> None:
        ring = self.rings[name]
        order, tail = ring.order, ring.tail
        while order and order[0][0] not in self.sources:
            ring.tail = order.popleft()[1]
        if ring.tail != tail:
            self.freed.append((name, ring.tail))

    def dump(self) -> dict[str, Any]:
        rings = {
            name: [
                ring.capacity,
                ring.member,
                ring.rank,
                ring.spilled,
                ring.head,
                ring.tail,
                [list(item) for item in ring.order],
            ]
            for name, ring in self.rings.items()
        }
        sources = [[n, s.ring, s.pos, s.seq, s.num_bytes, s.uses] for n, s in self.sources.items()]
        return {"rings": rings, "sources": sources, "next_ring": self.next_ring, "num_dropped": self.num_dropped}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Shelf:
        shelf = cls()
        for name, (capacity, member, rank, spilled, head, tail, order) in state["rings"].items():
            records = deque((num, end) for num, end in order)
            shelf.add(name, Ring(capacity, member, rank, spilled, head, tail, records))
        for num, *fields in state["sources"]:
            shelf.sources[num] = source = Source(*fields)
            shelf.live_bytes += source.num_bytes
        shelf.next_ring, shelf.num_dropped = state["next_ring"], state["num_dropped"]
        return shelf
