"""How much room every ring has: reservations made before work starts, records held until nobody reads them.

Owns the arithmetic of space (a part of the index's fold), not the memory: `ring.py` lays bytes, the coordinator moves tails.

Invariant: a reservation is granted only when `ring.fits` says that every outstanding reservation can still be put, whatever
the order; so a `put` under a reservation never waits and never fails, and back-pressure is work that is not handed out.

    reserve("group.7.1", "ring/rollout-0/0", [4096] * 8)   -> the lease of group 7, epoch 1, may be granted
    record("ring/rollout-0/0", pos=0, num_bytes=2048, uses=1, reservation="group.7.1", num_entries=3)
    release("group.7.1")                                   -> what was not used returns
    unuse("ring/rollout-0/0", pos=0) -> new tail           -> memory up to there may be overwritten
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from rondo.comm.ring.ring import fits


@dataclass(slots=True)
class RingSpace:
    """One ring as the coordinator accounts for it; positions are log offsets in bytes that only grow."""

    capacity: int
    owner: str  # group name of its producer
    overflow: bool = False  # it is taken away when it is idle: it serves one grant, or its producer has left
    head: int = 0
    tail: int = 0
    # position -> [end position, uses], in log order; a plain dict searches for its oldest
    records: OrderedDict[int, list[int]] = field(default_factory=OrderedDict)
    reserved: dict[str, list[int]] = field(default_factory=dict)  # reservation -> bytes of each record still to come
    promised: dict[str, int] = field(default_factory=dict)  # reservation -> those bytes together

    @property
    def reserved_bytes(self) -> int:
        return sum(self.promised.values())

    @property
    def idle(self) -> bool:
        return not self.records and not self.reserved


class Space:
    """All rings of a run. Pure: no clock, no memory; equal calls give equal state."""

    def __init__(self) -> None:
        self.rings: dict[str, RingSpace] = {}
        self._ring_of: dict[str, str] = {}
        self._owned: dict[str, list[str]] = {}  # owner -> its rings
        self._passing: set[str] = set()

    def add(self, name: str, capacity: int, owner: str, *, overflow: bool = False) -> None:
        if name not in self.rings:
            self._enter(name, RingSpace(capacity, owner, overflow))

    def _enter(self, name: str, ring: RingSpace) -> None:
        self.rings[name] = ring
        self._owned.setdefault(ring.owner, []).append(name)
        if ring.overflow:
            self._passing.add(name)

    def remove(self, name: str) -> None:
        ring = self.rings.pop(name)
        for reservation in ring.reserved:
            self._ring_of.pop(reservation, None)
        self._owned[ring.owner].remove(name)
        self._passing.discard(name)

    def owner(self, name: str) -> str | None:
        """Whose ring it is; None when it has been taken away."""
        return self.rings[name].owner if name in self.rings else None

    def owned_by(self, member: str) -> list[str]:
        """The rings that a member writes."""
        return list(self._owned.get(member, ()))

    def idle(self) -> list[str]:
        """The rings to be taken away now: empty, and they served one grant each, or their producers have left."""
        return [name for name in sorted(self._passing) if self.rings[name].idle] if self._passing else []

    def leave(self, owner: str) -> None:
        """A producer has left for good."""
        for name in self._owned.get(owner, ()):
            self.rings[name].overflow = True
            self._passing.add(name)

    def has_room(self, name: str, entries: list[int]) -> bool:
        """Whether records of these sizes (bytes each) can be promised beside everything promised already."""
        ring = self.rings[name]
        # Rows that finish together are put as one record, so the largest record is a whole reservation.
        return fits(ring.capacity, ring.head, ring.tail, list(ring.promised.values()), sum(entries))

    def reserve(self, reservation: str, name: str, entries: list[int]) -> None:
        self.rings[name].reserved[reservation] = list(entries)
        self.rings[name].promised[reservation] = sum(entries)
        self._ring_of[reservation] = name

    def holds(self, reservation: str) -> bool:
        """Whether anything of a reservation is left."""
        return reservation in self._ring_of

    def ring_of(self, reservation: str) -> str:
        """The ring in which a reservation was made. KeyError when nothing of it is left."""
        return self._ring_of[reservation]

    def release(self, reservation: str) -> str | None:
        """Return what is left of a reservation; the name of its ring, or None when there was none."""
        name = self._ring_of.pop(reservation, None)
        if name is not None and name in self.rings:
            self.rings[name].reserved.pop(reservation, None)
            self.rings[name].promised.pop(reservation, None)
        return name

    def record(self, name: str, pos: int, num_bytes: int, uses: int, reservation: str, num_entries: int) -> None:
        """A record became visible at `pos`: it uses up `num_entries` of its reservation and stays while it has uses."""
        ring = self.rings[name]
        ring.records[pos] = [pos + num_bytes, uses]
        ring.head = max(ring.head, pos + num_bytes)
        entries = ring.reserved.get(reservation)
        if entries is not None:
            ring.promised[reservation] -= sum(entries[:num_entries])
            del entries[:num_entries]
            if not entries:
                self.release(reservation)

    def unuse(self, name: str, pos: int, uses: int = 1) -> int | None:
        """So many users of a record are done. The ring's new tail when memory became free, else None."""
        ring = self.rings.get(name)
        if ring is None or pos not in ring.records:
            return None
        ring.records[pos][1] -= uses
        return self.trim(name)

    def trim(self, name: str) -> int | None:
        """Advance the tail over records that nobody uses; the new tail, or None when it stays."""
        ring, tail = self.rings[name], None
        while ring.records:
            pos, (end, uses) = next(iter(ring.records.items()))
            if uses > 0:
                break
            del ring.records[pos]
            ring.tail = tail = end
        return tail

    def dump(self) -> dict[str, Any]:
        return {
            name: {
                "capacity": ring.capacity,
                "owner": ring.owner,
                "overflow": ring.overflow,
                "head": ring.head,
                "tail": ring.tail,
                "records": [[pos, *record] for pos, record in ring.records.items()],
                "reserved": {key: list(entries) for key, entries in ring.reserved.items()},
            }
            for name, ring in self.rings.items()
        }

    @classmethod
    def load(cls, state: dict[str, Any]) -> Space:
        space = cls()
        for name, fields in state.items():
            records = OrderedDict((pos, [end, uses]) for pos, end, uses in fields["records"])
            promised = {reservation: sum(entries) for reservation, entries in fields["reserved"].items()}
            space._enter(name, RingSpace(**{**fields, "records": records, "promised": promised}))
            for reservation in fields["reserved"]:
                space._ring_of[reservation] = name
        return space
