"""The mirror: a ring that a link writes, with the positions and generations of the ring it comes from.

Owns what arrived and what of it is visible. It does not own sockets (`receiver.py`), nor who reads (a `RingView`, like any
ring's) or who may release (one releaser a ring: whoever calls `release`, or a `RingTail` of another process).

    log      tail            head = the cursor          have                          tail + capacity
              | records, visible | record, half arrived ###....##  | not yet sent        |
                                                                                         ^ credit: never sent beyond

Invariants:
- (pos, seq) names the same record here and at its origin; the head stands only at ends of records that stand there too.
- Chunks arrive in any order, straight into place. Payload, descriptor and header of a record, and of all before it, are
  there and checked before the head passes it, then the doorbell rings: what arrived in part is never seen.
- Nothing outside [head, tail + capacity) is written, and no checked byte twice.
- The head word is the cursor. A receiver killed anywhere is followed by one that starts at the same head; what had arrived
  beyond it is sent again. While the process lives, a new connection goes on after the last checked chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from rondo.comm.ring.records import ALIGN_BYTES, HEADER_BYTES, HEADER_FIELDS, RECORD
from rondo.comm.ring.ring import HEAD_WORD, MAGIC_WORD, RING_MAGIC, SEQ_WORD, TAIL_WORD, RingLog
from rondo.comm.ring.words import ring_doorbell
from rondo.runtime.errors import CorruptData, ProtocolError, Refused
from rondo.runtime.memory.segments import Segment

_BORN, _INCARNATION = 8, 9  # control words that only mirrors use: attempt + 1; the newest sender's incarnation + 1


@dataclass(frozen=True, slots=True)
class MirrorStats:
    """`assembled_bytes` arrived and are not visible yet; the counts are this process's own."""

    name: str
    capacity_bytes: int
    head_pos: int
    tail_pos: int
    assembled_bytes: int
    num_records: int
    num_bytes: int
    num_refused_chunks: int
    num_sessions: int


class Mirror(RingLog):
    """The receiver's side of one mirror; one process at a time, proved dead before the next one starts.

    The segment must have the size of the origin's. `doorbell_fd` is the mirror's own; None where nobody waits.
    """

    def __init__(self, segment: Segment, doorbell_fd: int | None, name: str) -> None:
        super().__init__(segment, name, readonly=False)
        self._doorbell_fd = doorbell_fd
        self._have: list[tuple[int, int]] = []  # checked intervals of the log that reach beyond the head, in order
        self._num_records = self._num_bytes = 0
        self.num_refused_chunks = self.num_sessions = 0

    @property
    def credit(self) -> int:
        """The log offset up to which may be sent."""
        return self.tail + self.capacity

    @property
    def seq(self) -> int:
        """The generation at the head. It may be ahead by the records of one death."""
        return self._words.load(SEQ_WORD)

    def admit(self, attempt: int, incarnation: int, tail: int) -> None:
        """Let a sender in: of this run's attempt, and no older than the last one. `tail` is where the origin's log begins.

        A fresh mirror begins there; readers open it after the first admission. Raises Refused.
        """
        born, newest = self._words.load(_BORN), self._words.load(_INCARNATION)
        if born and born != attempt + 1:
            raise Refused(
                f"mirror {self.name} must be fed by attempt {born - 1}, got attempt {attempt}. A new attempt makes new rings."
            )
        if incarnation + 1 < newest:
            raise Refused(
                f"the sender of ring {self.name} must be incarnation {newest - 1} or later, got {incarnation}. Another one "
                "took its place."
            )
        if not born:
            self._words.store(HEAD_WORD, tail)
            self._words.store(TAIL_WORD, tail)
            self._words.store(MAGIC_WORD, RING_MAGIC)
            self._words.store(_BORN, attempt + 1)
        elif tail > self.head:
            raise Refused(
                f"ring {self.name} must be held from {self.head}, which is mirrored, got a tail of {tail}: records between "
                "were released before they crossed. Release an origin only up to what its link reports."
            )
        self._words.store(_INCARNATION, incarnation + 1)
        if self._doorbell_fd is not None:
            ring_doorbell(self._doorbell_fd)  # a predecessor may have died between its head and its doorbell
        self.num_sessions += 1

    def have(self) -> list[tuple[int, int]]:
        """What arrived beyond the head, as [start, end) of the log."""
        head = self.head
        return [(max(start, head), end) for start, end in self._have if end > head]

    def keep(self, num_intervals: int) -> None:
        """Forget all that arrived beyond the first intervals: it will be sent again."""
        del self._have[num_intervals:]

    def target(self, pos: int, num_bytes: int) -> memoryview:
        """Where a chunk goes. Raises ProtocolError for one that a sender must not send."""
        at = pos % self.capacity
        if (
            num_bytes < ALIGN_BYTES
            or (pos | num_bytes) % ALIGN_BYTES
            or pos < self.head
            or pos + num_bytes > self.credit
            or at + num_bytes > self.capacity
            or any(start < pos + num_bytes and pos < end for start, end in self._have)
        ):
            raise ProtocolError(
                f"a chunk for mirror {self.name} must lie whole in [{self.head}, {self.credit}) where nothing has arrived, "
                f"got {num_bytes} bytes at {pos}. Connect again."
            )
        return self._data[at : at + num_bytes]

    def arrived(self, pos: int, num_bytes: int) -> int:
        """A chunk is there and checked. Shows the records that are whole now, in order; how many.

        Raises CorruptData at a record whose header or descriptor breaks its checksum; everything beyond the head is
        forgotten then, to be sent again.
        """
        start, end = pos, pos + num_bytes
        have = self._have
        i = bisect_left(have, (start, end))
        if i and have[i - 1][1] == start:
            i -= 1
            start = have.pop(i)[0]
        if i < len(have) and have[i][0] == end:
            end = have.pop(i)[1]
        have.insert(i, (start, end))
        try:
            return self._show()
        except CorruptData:
            have.clear()
            raise

    def _show(self) -> int:
        have, i, num_shown = self._have, 0, 0
        head = pos = self.head
        seq = self._words.load(SEQ_WORD)
        while True:
            while i < len(have) and have[i][1] <= pos:
                i += 1
            if i == len(have) or have[i][0] > pos or have[i][1] < pos + HEADER_BYTES:
                break
            at = pos % self.capacity
            *_, descriptor_bytes, _, _ = HEADER_FIELDS.unpack_from(self._data, at)
            if have[i][1] < min(pos + HEADER_BYTES + descriptor_bytes, pos - at + self.capacity):
                break  # the checksum covers a descriptor that is still on its way; a pad has none
            header, _ = self._header(pos)
            if header.kind == RECORD:
                if have[i][1] < pos + header.num_bytes:
                    break
                head, seq = pos + header.num_bytes, header.seq
                num_shown += 1
                self._num_bytes += header.num_bytes
            pos += header.num_bytes
        if num_shown:
            self._words.store(SEQ_WORD, seq)
            self._words.store(HEAD_WORD, head)
            if self._doorbell_fd is not None:
                ring_doorbell(self._doorbell_fd)
            self._have = [interval for interval in have if interval[1] > head]
            self._num_records += num_shown
        return num_shown

    def release(self, upto_pos: int) -> None:
        """Let the sender overwrite everything before `upto_pos`, the end of a visible record. Older ones change nothing."""
        self._release(upto_pos, self.head)

    def stats(self) -> MirrorStats:
        assembled = sum(end - start for start, end in self.have())
        return MirrorStats(
            self.name, self.capacity, self.head, self.tail, assembled, self._num_records, self._num_bytes,
            self.num_refused_chunks, self.num_sessions,
        )  # fmt: skip
