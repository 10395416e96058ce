"""The origin: a ring as its link reads it, cut into pieces that may leave.

Owns the order in which bytes of the ring are offered. Does not own the ring (its producer writes it, the coordinator alone
releases it), nor how many bytes the other side has room for (`credit`).

    log      [ record | record |   long record   | pad ......] [ record | ...        chunk_bytes = 4
    pieces     1111     1122     2223333444        5 (header)    6666

    log      | header, descriptor | payload ................ | pad ....              `apart`: payloads cross another way
    pieces   |        host        | payload | payload | pay. | host (64 bytes)

Invariants: a piece never crosses the end of a lap and is never sent beyond the credit; of a pad only the header is sent;
what the mirror has already is not offered again; a piece that was refused comes first. Where payloads cross apart, no piece has
bytes of both ways, or of two records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rondo.comm.ring.records import HEADER_BYTES, PAD, RECORD, align
from rondo.comm.ring.ring import RingView
from rondo.comm.ring.words import PEEK_IS_SAFE, settle
from rondo.runtime.errors import CorruptData, Refused
from rondo.runtime.memory.segments import Segment


class Piece(NamedTuple):
    """`num_bytes` of the log at `pos`; where payloads cross apart, whether they are a payload's."""

    pos: int
    num_bytes: int
    is_payload: bool


class Origin(RingView):
    """One ring, read from a cursor on. `num_records` counts those whose first byte was offered since `start`."""

    num_records = 0
    _next = _walked = _seen = _payload_pos = 0
    _have: list[tuple[int, int]]
    _again: list[tuple[int, int]]

    def __init__(self, segment: Segment, name: str, *, apart: bool = False) -> None:
        super().__init__(segment, name)
        self._apart = apart

    def start(self, cursor: int, seq: int, have: Sequence[tuple[int, int]]) -> None:
        """Begin behind what a mirror has: records up to `cursor`, the last of generation `seq`, and the intervals `have`.

        Raises Refused when that mirror cannot be of this ring.
        """
        self.look()
        if not self.tail <= cursor <= self._seen:
            raise Refused(
                f"a mirror of ring {self.name} must stand between tail {self.tail} and head {self._seen}, got {cursor}. It "
                "mirrors another ring: drop it."
            )
        if cursor < self._seen and (found := self._header(cursor)[0].seq) < seq:
            raise Refused(
                f"the record at {cursor} of ring {self.name} must come after generation {seq}, got {found}. It mirrors "
                "another ring: drop it."
            )
        self._next = self._walked = cursor
        self._have = [(start, end) for start, end in have]
        self._again = []

    def look(self) -> None:
        """See new records. Where `PEEK_IS_SAFE` is False: after a doorbell was drained."""
        self._seen = self.head
        settle()

    def again(self, pos: int, num_bytes: int) -> None:
        """A piece did not arrive as it was: it goes first now. Where payloads cross apart, one of a payload."""
        self._again.append((pos, num_bytes))

    def waits_for_room(self, credit: int) -> bool:
        """Whether there is something to send that the other side has no room for."""
        return not self._again and credit <= self._next < self._seen

    def take(self, chunk_bytes: int, credit: int) -> Piece | None:
        """The next piece; None when there is none below `credit`. Raises CorruptData at a broken record."""
        if self._again:
            return Piece(*self._again.pop(0), self._apart)
        if PEEK_IS_SAFE and self._next == self._seen:
            self.look()
        end = min(self._seen, credit)
        while self._next < end:
            if self._have and self._have[0][0] <= self._next:
                self._next = max(self._next, self._have.pop(0)[1])
            elif self._walked <= self._next:
                pos = self._walked
                if self._walk() == PAD:
                    first, self._next = self._next, max(self._next, self._walked)
                    if first == pos:
                        return Piece(pos, HEADER_BYTES, False)
            else:
                return self._cut(chunk_bytes, end)
        return None

    def view(self, pos: int, num_bytes: int) -> memoryview:
        """The bytes of a piece, in place. Raises CorruptData when they were released, and so may be others by now."""
        if pos < self.tail:
            raise CorruptData(
                f"ring {self.name} must be held until it is mirrored, got a tail of {self.tail} above {pos}. Release an "
                "origin only up to what its link reports."
            )
        at = pos % self.capacity
        return self._data[at : at + num_bytes]

    def _walk(self) -> int:
        """Step over one record; its kind."""
        pos = self._walked
        header, _ = self._header(pos)
        if header.kind == RECORD:
            self.num_records += 1
            self._payload_pos = pos + align(HEADER_BYTES + header.descriptor_bytes)
        self._walked += header.num_bytes
        return header.kind

    def _cut(self, chunk_bytes: int, end: int) -> Piece:
        pos = self._next
        stop = min(pos + chunk_bytes, end)
        is_payload = self._apart and pos >= self._payload_pos
        while not self._apart and self._walked < min(stop, self._seen) and self._walked % self.capacity:
            if self._header(self._walked)[0].kind == PAD:
                break
            self._walk()
        stop = min(stop, self._walked if is_payload or not self._apart else self._payload_pos)
        if self._have:
            stop = min(stop, self._have[0][0])
        self._next = stop
        return Piece(pos, stop - pos, is_payload)
