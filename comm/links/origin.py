"""The origin: a ring as its link reads it, cut into chunks that may leave.

Owns the order in which bytes of the ring are offered. Does not own the ring (its producer writes it, the coordinator alone
releases it), nor how many bytes the other side has room for (`credit`).

    log      [ record | record |   long record   | pad ......] [ record | ...        chunk_bytes = 4
    chunks     1111     1122     2223333444        5 (header)    6666

Invariants: a chunk never crosses the end of a lap and is never sent beyond the credit; of a pad only the header is sent;
what the mirror has already is not offered again; a chunk that was refused comes first. Chunks are views of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from rondo.comm.ring.records import HEADER_BYTES, PAD, RECORD
from rondo.comm.ring.ring import RingView
from rondo.comm.ring.words import PEEK_IS_SAFE, settle
from rondo.runtime.errors import CorruptData, Refused


class Origin(RingView):
    """One ring, read from a cursor on. `num_records` counts those whose first byte was offered since `start`."""

    num_records = 0
    _next = _walked = _seen = 0
    _have: list[tuple[int, int]]
    _again: list[tuple[int, int]]

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
        """A chunk did not arrive as it was: it goes first now."""
        self._again.append((pos, num_bytes))

    def waits_for_room(self, credit: int) -> bool:
        """Whether there is something to send that the other side has no room for."""
        return not self._again and credit <= self._next < self._seen

    def take(self, chunk_bytes: int, credit: int) -> tuple[int, int] | None:
        """The next chunk, as (pos, bytes); None when there is none below `credit`. Raises CorruptData at a broken record."""
        if self._again:
            return self._again.pop(0)
        if PEEK_IS_SAFE and self._next == self._seen:
            self.look()
        end = min(self._seen, credit)
        while self._next < end:
            if self._have and self._have[0][0] <= self._next:
                self._next = max(self._next, self._have.pop(0)[1])
                continue
            if self._walked <= self._next:
                pos = self._walked
                if self._walk() == PAD:
                    first, self._next = self._next, max(self._next, self._walked)
                    if first == pos:
                        return pos, HEADER_BYTES
                continue
            return self._cut(chunk_bytes, end)
        return None

    def view(self, pos: int, num_bytes: int) -> memoryview:
        """The bytes of a chunk, in place. Raises CorruptData when they were released, and so may be others by now."""
        if pos < self.tail:
            raise CorruptData(
                f"ring {self.name} must be held until it is mirrored, got a tail of {self.tail} above {pos}. Release an "
                "origin only up to what its link reports."
            )
        at = pos % self.capacity
        return self._data[at : at + num_bytes]

    def _walk(self) -> int:
        """Step over one record; its kind."""
        header, _ = self._header(self._walked)
        if header.kind == RECORD:
            self.num_records += 1
        self._walked += header.num_bytes
        return header.kind

    def _cut(self, chunk_bytes: int, end: int) -> tuple[int, int]:
        pos = self._next
        stop = pos + chunk_bytes
        while self._walked < min(stop, self._seen) and self._walked % self.capacity:
            header, _ = self._header(self._walked)
            if header.kind == PAD:
                break
            self.num_records += 1
            self._walked += header.num_bytes
        stop = min(stop, self._walked, end)
        if self._have:
            stop = min(stop, self._have[0][0])
        self._next = stop
        return pos, stop - pos
