"""The ring: a bounded log with one producer, in memory that outlives every process that uses it.

Owns where records go, who may overwrite what, and when a record becomes visible. It does not own the layout of a record
(`records.py`), the memory (`runtime/memory/segments.py`), nor who reads which row and when it is released (the coordinator).

    segment   | control words, 4096 B | data, `capacity` bytes                                              |
    log                     tail v                                 head v           tail + capacity v
              ... released ...|  record  |  record  |  pad  |  record  |  free                       |

Positions are log offsets in bytes: they start at 0, only grow, and lie at `pos % capacity` of the data. A record is
contiguous; where it does not fit before the end of the data, a pad record fills the rest and it starts the next lap.

Invariants:
- Only the producer stores the head, only the coordinator stores the tail, and nothing outside [head, tail + capacity)
  is ever written. So bytes of a record stay as they are until the tail has passed it.
- Payload, descriptor and header are stored before the head. A producer killed anywhere before that leaves nothing that
  anyone sees, and its successor starts again at the same head. `seq` (the generation) only grows; a death may skip one.
- After the head the doorbell is rung, always (`words.py`). A producer killed between the two has put the record: the
  coordinator polls a ring once more when it learns of its producer's death.

A fresh segment, all zeros, is an empty ring: writer, tail and readers may come in any order.

Space. A put takes `record_bytes`, plus one pad where it meets the end of the data; a pad is smaller than the record
behind it. `put` never waits: whoever calls it holds a reservation, and `fits` says whether one more can be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rondo.comm.ring.records import (
    ALIGN_BYTES,
    HEADER_BYTES,
    PAD,
    RECORD,
    STORAGE,
    Column,
    ColumnLayout,
    Descriptor,
    Header,
    column_arrays,
    plan,
    read_descriptor,
    read_generation,
    read_header,
    write_header,
    write_payload,
)
from rondo.comm.ring.spans import num_rows
from rondo.comm.ring.words import Words, be_settled, ring_doorbell, settle
from rondo.runtime.errors import CorruptData, OutOfSpace
from rondo.runtime.memory.segments import Segment

CONTROL_BYTES = 4096
MAGIC_WORD, HEAD_WORD, TAIL_WORD, SEQ_WORD = range(4)
RING_MAGIC = int.from_bytes(b"rondo-r1", "little")


class RecordRef(NamedTuple):
    """Names a record for good: `pos` and `seq` never come twice in the life of a ring. `num_bytes` is without any
    pad."""

    ring: str
    pos: int
    seq: int
    num_bytes: int


def capacity_of(segment_bytes: int) -> int:
    """How many bytes of records a segment of this size holds. Raises ValueError when it is too small for any."""
    capacity = (segment_bytes - CONTROL_BYTES) // ALIGN_BYTES * ALIGN_BYTES
    if capacity < 2 * HEADER_BYTES:
        raise ValueError(
            f"a ring's segment must have at least {ring_bytes(2 * HEADER_BYTES)} bytes, got {segment_bytes}."
        )
    return capacity


def ring_bytes(capacity: int) -> int:
    """The segment that holds `capacity` bytes of records."""
    return CONTROL_BYTES + -(-capacity // ALIGN_BYTES) * ALIGN_BYTES


def place(capacity: int, head: int, num_bytes: int) -> int:
    """Where the next record goes: at the head, or behind a pad at the start of the next lap."""
    to_end = capacity - head % capacity
    return head if num_bytes <= to_end else head + to_end


def fits(capacity: int, head: int, tail: int, reserved: Sequence[int], request: int) -> bool:
    """Whether `request` more bytes can be promised beside the `reserved` ones, given that all of those were granted so.

    A promise is an upper bound in bytes, kept by one record or by several that are together no larger. The formula:
    before the tail moves a lap ends at most once, so all promises take at most their sum, plus, where the sum reaches
    past the end of the data, one pad, which is at most what is left of the lap and at least 64 bytes smaller than the
    largest promise. Where that is at most `tail + capacity - head`, no put under any of them raises OutOfSpace, in
    whatever order they come, however much smaller they turn out, and wherever the tail moves meanwhile.

    Head and tail may be older than the ring's own, as long as `reserved` still counts every put not seen yet. A promise
    ends with its put or with its producer's proved death, not with a deadline: its put could still come.
    """
    total = sum(reserved) + request
    to_end = capacity - head % capacity
    pad = 0 if total <= to_end else min(to_end, max(request, max(reserved, default=0)) - ALIGN_BYTES)
    return total + pad <= tail + capacity - head


class RingLog:
    """What all three sides share: the words, the data, and the check that this is a ring at all."""

    def __init__(self, segment: Segment, name: str, readonly: bool) -> None:
        self.name = name
        self.capacity = capacity_of(segment.num_bytes)
        view = segment.view(readonly=readonly)
        self._words = Words(view, 0, CONTROL_BYTES // ALIGN_BYTES)
        self._data = view[CONTROL_BYTES : CONTROL_BYTES + self.capacity]
        self._bytes = np.frombuffer(self._data, np.uint8)
        magic = self._words.load(MAGIC_WORD)
        if magic not in (0, RING_MAGIC):
            raise CorruptData(
                f"segment {segment.name} must hold a ring, got the mark {magic:#x}. Give it a name of its own."
            )

    @property
    def head(self) -> int:
        return self._words.load(HEAD_WORD)

    @property
    def tail(self) -> int:
        return self._words.load(TAIL_WORD)

    def close(self) -> None:
        """Let go of the segment, so that it can be closed. Arrays that a reader still holds keep their memory
        mapped."""
        del self._words, self._data, self._bytes

    def _release(self, upto_pos: int, seen: int) -> None:
        """`upto_pos` must end a record up to `seen`."""
        if upto_pos > seen or upto_pos % ALIGN_BYTES:
            raise ValueError(
                f"a release in ring {self.name} must end a record seen so far (cursor {seen}), got {upto_pos}."
            )
        if upto_pos > self.tail:
            self._words.store(TAIL_WORD, upto_pos)

    def _header(self, pos: int) -> tuple[Header, bytes]:
        at = pos % self.capacity
        return read_header(self._data, at, pos, self.capacity - at)


class RingWriter(RingLog):
    """The producer's side; one process at a time, proved dead before the next one starts.

    Takes over at the head of whatever the ring holds. `doorbell_fd` (`words.new_doorbell`) belongs to this ring alone;
    None is for logs that nobody waits on.
    """

    def __init__(self, segment: Segment, doorbell_fd: int | None, name: str) -> None:
        super().__init__(segment, name, readonly=False)
        be_settled()
        self._words.store(MAGIC_WORD, RING_MAGIC)
        self._doorbell_fd = doorbell_fd

    def put(
        self,
        spans: Sequence[Sequence[int]],
        columns: Sequence[Column],
        *,
        epoch: int,
        attempt: int,
        meta: Mapping[str, Any] | None = None,
        info: Sequence[Sequence[float | None]] = (),
    ) -> RecordRef:
        """Copy one record in, show it and ring the doorbell. Never waits.

        `spans` name its rows (`spans.py`), `columns` have one array a row, `info` are fields of numbers (`records.py`). Raises
        ValueError for columns that contradict rows or dtypes, OutOfSpace when the record does not fit: a put without a
        reservation.
        """
        record = plan(spans, columns, meta, info)
        head = self.head
        pos = place(self.capacity, head, record.num_bytes)
        if pos + record.num_bytes > self.tail + self.capacity:
            raise OutOfSpace(
                f"a put into ring {self.name} must fit a reservation, got {record.num_bytes} bytes (and a pad of "
                f"{pos - head}) beside {head - self.tail} of {self.capacity} in use. Reserve worst_case_bytes first."
            )
        seq = self._words.load(SEQ_WORD) + 1
        if pos != head:
            write_header(self._data, head % self.capacity, Header(PAD, head, seq, pos - head, 0, epoch, attempt))
        at = pos % self.capacity
        write_payload(record, columns, self._bytes[at + record.payload : at + record.num_bytes])
        header = Header(RECORD, pos, seq, record.num_bytes, len(record.descriptor), epoch, attempt)
        write_header(self._data, at, header, record.descriptor)
        self._words.store(SEQ_WORD, seq)
        self._words.store(HEAD_WORD, pos + record.num_bytes)
        if self._doorbell_fd is not None:
            ring_doorbell(self._doorbell_fd)
        return RecordRef(self.name, pos, seq, record.num_bytes)


class RingTail(RingLog):
    """The coordinator's side: sees every record once, in order, and says what may be overwritten.

    `cursor` is the log offset up to which everything was seen; a restarted coordinator passes the one it journalled.
    """

    def __init__(self, segment: Segment, name: str, cursor: int | None = None) -> None:
        super().__init__(segment, name, readonly=False)
        self.cursor = self.tail if cursor is None else cursor
        if not self.tail <= self.cursor <= self.head:
            raise CorruptData(
                f"the cursor of ring {name} must lie between tail {self.tail} and head {self.head}, got {cursor}."
            )

    def poll(self) -> list[tuple[RecordRef, Descriptor]]:
        """Every record that became visible since the last poll, oldest first; an empty list when there is none.

        Call `words.drain(doorbell_fd)` first, always in this order: only then is the head loaded here sure to be as new
        as the last ring. `words.py` says when to look at all where `PEEK_IS_SAFE` is False.
        Raises CorruptData at a record that breaks its checksum; the cursor stays before it.
        """
        seen: list[tuple[RecordRef, Descriptor]] = []
        head = self.head
        settle()
        while self.cursor < head:
            header, raw = self._header(self.cursor)
            if header.kind == RECORD:
                ref = RecordRef(self.name, header.pos, header.seq, header.num_bytes)
                seen.append((ref, read_descriptor(header, raw)))
            self.cursor += header.num_bytes
        return seen

    def release(self, upto_pos: int) -> None:
        """Let the producer overwrite everything before `upto_pos`, the end of a record (`ref.pos + ref.num_bytes`).

        To be called when every reader of it acknowledged or is proved dead. Repeating an older release changes nothing.
        """
        self._release(upto_pos, self.cursor)


class Record:
    """One record, read in place: arrays are read-only views of the ring, good until the record is released.

    Check `valid()` after the last use and before the acknowledgement; False means the memory may hold something else by
    now, and what was computed from it is to be thrown away.
    """

    __slots__ = ("_log", "_payload", "_rows_of", "descriptor", "ref")

    def __init__(self, log: RingView, ref: RecordRef, descriptor: Descriptor, payload: np.ndarray) -> None:
        self.ref = ref
        self.descriptor = descriptor
        self._log = log
        self._payload = payload
        self._rows_of: dict[str, list[np.ndarray]] = {}

    def arrays(self, name: str) -> list[np.ndarray]:
        """The column `name`, one array a row in the order of `descriptor.spans`. Raises KeyError for an unknown
        column."""
        arrays = self._rows_of.get(name)
        if arrays is None:
            arrays = self._rows_of[name] = column_arrays(self._payload, self._layout(name))
        return arrays

    def packed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The column `name`, all rows end to end, and how many elements each has; of rows with one dimension, or flattened."""
        layout = self._layout(name)
        lengths, dtype = np.asarray(layout.sizes()), STORAGE[layout.dtype]
        end = layout.offset + int(lengths.sum()) * dtype.itemsize
        return self._payload[layout.offset : end].view(dtype), lengths

    def column(self, name: str, row: int) -> np.ndarray:
        """Row `row` of column `name`, in its shape, with the numpy dtype `records.STORAGE[dtype]`."""
        return self.arrays(name)[row]

    @property
    def num_rows(self) -> int:
        return num_rows(self.descriptor.spans)

    def dtype(self, name: str) -> str:
        return self._layout(name).dtype

    def valid(self) -> bool:
        """Whether the bytes are still this record's."""
        return self._log.holds(self.ref)

    def _layout(self, name: str) -> ColumnLayout:
        names = self.descriptor.make.names
        if name not in names:
            raise KeyError(f"column {name} must be in the record, which has {', '.join(names) or 'none'}.")
        return self.descriptor.layout(name)


class RingView(RingLog):
    """A reader's side: maps the ring once, read-only, and reads what the coordinator names."""

    def __init__(self, segment: Segment, name: str) -> None:
        super().__init__(segment, name, readonly=True)

    def read(self, pos: int, seq: int) -> Record:
        """The record at log offset `pos` with generation `seq`. Raises CorruptData when the ring holds it no more."""
        if pos < self.tail:
            raise CorruptData(
                f"the record at {pos} of ring {self.name} must not be released, got a tail of {self.tail}."
            )
        header, raw = self._header(pos)
        if header.kind != RECORD or header.seq != seq:
            raise CorruptData(f"the record at {pos} of ring {self.name} must be generation {seq}, got {header.seq}.")
        decoded = read_descriptor(header, raw)
        at = pos % self.capacity
        ref = RecordRef(self.name, pos, seq, header.num_bytes)
        return Record(self, ref, decoded, self._bytes[at + decoded.payload : at + header.num_bytes])

    def holds(self, ref: RecordRef) -> bool:
        """Whether `ref` is neither released nor overwritten."""
        here = read_generation(self._data, ref.pos % self.capacity) == (ref.pos, ref.seq)
        return here and self.tail <= ref.pos
