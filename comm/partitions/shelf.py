"""The memory under a partition: its rings, the records in them, and how many rows still need each.

Owns which record lies where, a part of the fold; room is accounted for as the bus does (`bus/space.py`), bytes are laid by
`ring.py`, tails are moved by the coordinator. Every ring has one producer, and nobody else promises its room, so the producer
sees by itself, in the ring's words, what it may put: no reservation is made for a put, and one ring taken serves as many puts as
fit.

    ring "p/3/0"   tail v                                    head v
                   | record 7, 2 uses | record 8, none | record 9, 64 uses |
    unuse(7, 2) -> the tail moves behind record 8

Invariant: a record's memory is given back when nothing uses it and nothing older in its ring is used; each operation costs
as much as it touches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rondo.comm.bus.space import RingSpace, Space
from rondo.comm.partitions.memory import FILE
from rondo.comm.ring.ring import ring_bytes


class Source(NamedTuple):
    """Where a record lies."""

    ring: str
    pos: int
    seq: int
    num_bytes: int


class Shelf:
    def __init__(self) -> None:
        self.sources: dict[int, Source] = {}  # records in use
        self.live_bytes = 0  # theirs
        self.next_ring = 0
        self.num_dropped = 0  # rings taken away so far: readers look again when it changes
        self.freed: dict[str, int] = {}  # ring -> its new tail
        self._space = Space()

    @property
    def rings(self) -> dict[str, RingSpace]:
        return self._space.rings

    @property
    def ring_bytes(self) -> int:
        """Memory of all rings that are not files."""
        return sum(ring_bytes(ring.capacity) for name, ring in self.rings.items() if not name.startswith(FILE))

    def add(self, name: str, capacity: int, member: str, rank: int) -> None:
        self._space.add(name, capacity, f"{member}/{rank}")
        self.next_ring += 1

    def remove(self, name: str) -> None:
        """An empty ring is gone."""
        self._space.remove(name)
        self.num_dropped += 1

    def of(self, member: str, rank: int) -> list[str]:
        """The rings of one producer."""
        return self._space.owned_by(f"{member}/{rank}")

    def record(self, num: int, source: Source, uses: int) -> None:
        """A record became visible and so many rows have values in it."""
        self._space.record(source.ring, source.pos, source.num_bytes, uses, "", 0)
        self.sources[num] = source
        self.live_bytes += source.num_bytes
        self.unuse(num, 0)

    def uses(self, num: int) -> int:
        """How many rows need a record."""
        source = self.sources[num]
        return self.rings[source.ring].records[source.pos][1]

    def unuse(self, num: int, rows: int) -> None:
        """So many need it no more."""
        source = self.sources[num]
        if self.uses(num) == rows:
            del self.sources[num]
            self.live_bytes -= source.num_bytes
        tail = self._space.unuse(source.ring, source.pos, rows)
        if tail is not None:
            self.freed[source.ring] = tail

    def dump(self) -> dict[str, Any]:
        return {
            "space": self._space.dump(), "sources": [[num, *source] for num, source in self.sources.items()],
            "next_ring": self.next_ring, "num_dropped": self.num_dropped,
        }  # fmt: skip

    @classmethod
    def load(cls, state: dict[str, Any]) -> Shelf:
        shelf = cls()
        shelf._space = Space.load(state["space"])
        shelf.sources = {num: Source(*fields) for num, *fields in state["sources"]}
        shelf.live_bytes = sum(source.num_bytes for source in shelf.sources.values())
        shelf.next_ring, shelf.num_dropped = state["next_ring"], state["num_dropped"]
        return shelf
