"""How a record lies in memory: header, descriptor, one extent a column.

Owns the layout, its sizes and its checks; not where records go (`ring.py`) and not what columns mean (`bus.py`).

    | header 64 B | descriptor | 0..63 B | extent of column 0 | 0..63 B | extent of column 1 | ...
                                         ^ payload, 64-byte aligned; the rows of a column lie end to end

Rows are jagged: a column has one array a row, of any shape; empty and 0-d arrays are fine. The descriptor names the
rows as spans (`spans.py`), and for every column its dtype, its offset from the payload and the shape of each row. Sizes come from
the shapes alone, and `num_bytes` counts the whole record as it lies in the ring, a multiple of 64.

    descriptor = num spans, bytes of make, uint32 | make | spans, int64 [num, 4] | offsets, int64 [columns]
                 | lengths [num, rows] | info [num, rows] | JSON, or nothing

Whatever there is one of a row is a number: lengths, once for all columns that have the same, and what the put says of its rows.
The make names columns, dtypes and the types of these numbers; it is the same for record after record, so it is encoded and
decoded once (`Make`). JSON holds what is said of the record, and shapes where rows have not one dimension.

Header and descriptor are made once, by the producer: the coordinator journals them as they are (`Descriptor.raw`), and readers
read them in the ring.

Invariant: nothing is read out of a record before its magic, its position and the CRC-32 over header and descriptor
agree. Payload bytes carry no checksum here: shared memory does not lose bits, generations catch what is overwritten, `words.py`
orders what is read early, and a CRC-32 (2.7 GB/s) at the put and at the read would cost more than all else that the bus does with
a row.

    columns = [Column("tokens", "int32", [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)])]
    record_bytes([(7, 0, 0, 2)], columns)  # two rows: samples 0 and 1 of group 7, part 0 of each
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain, pairwise
from math import isfinite, nan, prod
from typing import Any, NamedTuple

import numpy as np
import orjson

from rondo.comm.ring.spans import num_rows
from rondo.runtime.errors import CorruptData

ALIGN_BYTES = 64
HEADER_BYTES = 64
GROUP_BLOB = -1
"""Sample number of a row that belongs to a whole prompt group (its media)."""

PAD, RECORD = 2, 3
_MAGIC = b"RREC"
HEADER_FIELDS = struct.Struct("<4sIQQQIqq")  # magic, kind, pos, seq, bytes, descriptor bytes, epoch, attempt
_CRC = struct.Struct("<I8x")  # of the fields and the descriptor
_HEADER = struct.Struct(HEADER_FIELDS.format + "I8x")  # both
_GENERATION = struct.Struct("<QQ")  # pos, seq
_GENERATION_AT = 8
_JSON = orjson.OPT_SERIALIZE_NUMPY
_COUNTS = struct.Struct("<II")  # spans, bytes of the make

# Upper bounds, in bytes. A shape of 4 dimensions below 10**10 has at most 46 as JSON, with its comma; a length has 8.
_SHAPE_BYTES = 48
_SPAN_BYTES = 32  # of one row; a span of several has fewer than as many of one
_FIELDS = 8  # that are said of a row
_NUMBER_BYTES = 20
_DTYPE_BYTES = 16

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NATIVE = ("bool", *_INTEGERS, "float16", "float32", "float64")
_STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
STORAGE = {name: np.dtype(name) for name in _NATIVE} | {name: np.dtype(raw) for name, raw in _STORED_AS.items()}
"""dtype of a column -> numpy dtype of its arrays (numpy knows no bfloat16: its bits travel as uint16)."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a record: `arrays[i]` belongs to row `i` and has the numpy dtype `STORAGE[dtype]`. Packed, with `lengths`,
    the rows lie end to end in the arrays, most often one, and row `i` is the next `lengths[i]` elements."""

    name: str
    dtype: str
    arrays: Sequence[np.ndarray]
    lengths: Sequence[int] | None = None


class ColumnLayout(NamedTuple):
    """Where a column lies: `offset` bytes from the payload, rows end to end in the order of `lengths` (of a record that was read,
    integers in its descriptor), or of `shapes` where some row has not exactly one dimension."""

    name: str
    dtype: str
    offset: int
    lengths: Sequence[int] | None
    shapes: list[list[int]] | None = None

    def sizes(self) -> Sequence[int]:
        """Elements of every row."""
        return self.lengths if self.lengths is not None else [prod(shape) for shape in self.shapes or ()]


class Make(NamedTuple):
    """What records of one kind have alike. `kinds`: the types of their numbers, lists of lengths first, as `struct` has them;
    `starts`: where each begins, in bytes a row; `lengths`: which of them each column has, None where shapes are said."""

    num_lengths: int
    kinds: str
    starts: tuple[int, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    lengths: tuple[int | None, ...]


class Descriptor(NamedTuple):
    """What a record says about itself. `spans` name its rows; `payload` is its offset in the record, in bytes; `raw`: header and
    descriptor as they lie, with what there is one of a row from byte `numbers` on."""

    spans: list[list[int]]
    epoch: int
    attempt: int
    seq: int
    make: Make
    offsets: list[int]
    num_rows: int
    numbers: int
    meta: dict[str, Any]
    shapes: list[list[list[int]]]  # of the columns that have no lengths
    payload: int
    raw: bytes

    def info(self) -> list[Sequence[float | None]]:
        """What the put said of rows: a number of each for every field."""
        n, make = self.num_rows, self.make
        kinds = make.kinds[make.num_lengths :]
        values = _numbers_of(kinds, n).unpack_from(self.raw, self.numbers + n * make.starts[make.num_lengths])
        fields: list[Any] = [values[i : i + n] for i in range(0, len(values), n)]
        for i, kind in enumerate(kinds):
            if kind == "d" and not isfinite(sum(fields[i])):
                fields[i] = [value if isfinite(value) else None for value in fields[i]]
        return fields

    @property
    def columns(self) -> list[ColumnLayout]:
        return [self.layout(name) for name in self.make.names]

    def layout(self, name: str) -> ColumnLayout:
        """ValueError where there is no such column."""
        make = self.make
        i = make.names.index(name)
        which = make.lengths[i]
        if which is None:
            shapes = self.shapes[make.lengths[:i].count(None)]
            return ColumnLayout(name, make.dtypes[i], self.offsets[i], None, shapes)
        at, n = self.numbers, self.num_rows
        kind: Any = make.kinds[which]
        lengths = memoryview(self.raw)[at + n * make.starts[which] : at + n * make.starts[which + 1]].cast(kind)
        return ColumnLayout(name, make.dtypes[i], self.offsets[i], lengths)


class Header(NamedTuple):
    """The first 64 bytes. `pos` is the log offset it was written for, `seq` the generation."""

    kind: int
    pos: int
    seq: int
    num_bytes: int
    descriptor_bytes: int
    epoch: int
    attempt: int


class Plan(NamedTuple):
    """A record before it is written: descriptor, offset of the payload, and (offset in it, bytes) of every column."""

    descriptor: bytes
    payload: int
    extents: list[tuple[int, int]]
    num_bytes: int


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def plan(
    spans: Sequence[Sequence[int]],
    columns: Sequence[Column],
    meta: Mapping[str, Any] | None = None,
    info: Sequence[Sequence[float | None]] = (),
) -> Plan:
    """Lay out a record. `info`: fields of numbers, of each row one. Raises ValueError for what no record can hold."""
    n = num_rows(spans)
    if n < 1:
        raise ValueError("a record must have at least one row, got none.")
    made: list[tuple[str, str, int | None]] = []
    extents: list[tuple[int, int]] = []
    different: list[Sequence[int]] = []  # lists of lengths
    shapes: list[list[tuple[int, ...]]] = []  # of columns whose rows have not one dimension
    offset = 0
    for column in columns:
        arrays, lengths, dtype = column.arrays, column.lengths, STORAGE.get(column.dtype)
        # Most arrays have the very dtype object; comparing others costs more.
        if dtype is None or [a for a in arrays if a.dtype is not dtype and a.dtype != dtype]:
            raise ValueError(_column_fault(column, n))
        size, which = sum([a.size for a in arrays]), None
        if lengths is None and len(arrays) == n:
            if [a.ndim for a in arrays].count(1) == n:
                lengths = [a.size for a in arrays]
        elif lengths is None or len(lengths) != n or min(lengths) < 0 or sum(lengths) != size:
            raise ValueError(_column_fault(column, n))
        if lengths is None:
            shapes.append([a.shape for a in arrays])
        else:
            if lengths not in different:
                different.append(lengths)
            which = different.index(lengths)
        made.append((column.name, column.dtype, which))
        extents.append((offset, size * dtype.itemsize))
        offset = align(offset + size * dtype.itemsize)
    if [field for field in info if len(field) != n]:
        raise ValueError(f"what is said of rows must have {n} numbers a field, got {list(map(len, info))}.")
    offsets = [start for start, _ in extents]
    try:
        descriptor = _described(spans, offsets, tuple(made), len(different), [*different, *info], meta, shapes)
    except OverflowError as error:
        raise ValueError(_record_fault(columns, 0)) from error
    names = {name for name, _, _ in made}
    if len(names) != len(made) or (
        shapes and len(descriptor) > _descriptor_limit(n, names, len(orjson.dumps(meta or {}, option=_JSON)), len(info))
    ):
        raise ValueError(_record_fault(columns, len(descriptor)))
    payload = align(HEADER_BYTES + len(descriptor))
    return Plan(descriptor, payload, extents, payload + offset)


def record_bytes(
    spans: Sequence[Sequence[int]],
    columns: Sequence[Column],
    meta: Mapping[str, Any] | None = None,
    info: Sequence[Sequence[float | None]] = (),
) -> int:
    """Exactly what a put of these takes in a ring, in bytes, without the pad that may stand before it."""
    return plan(spans, columns, meta, info).num_bytes


def worst_case_bytes(n: int, columns: Iterable[tuple[str, int, int]], meta_bytes: int = 1024) -> int:
    """An upper bound of `record_bytes` for records not made yet.

    `columns` are (name, itemsize in bytes, most elements a row); a record may leave columns out. `meta_bytes` bounds
    `len(orjson.dumps(meta))`. Bounds add up: one record of `n` rows is never larger than the bound of `n` records of
    one row.
    """
    columns = list(columns)
    extents = sum(align(n * itemsize * max_elements) for _, itemsize, max_elements in columns)
    descriptor = _descriptor_limit(n, [name for name, _, _ in columns], meta_bytes)
    return align(HEADER_BYTES + descriptor) + extents


def write_payload(record: Plan, columns: Sequence[Column], payload: np.ndarray) -> None:
    """Copy every column into its extent of `payload` (uint8)."""
    for column, (start, num_bytes) in zip(columns, record.extents, strict=True):
        if num_bytes:
            into = payload[start : start + num_bytes].view(STORAGE[column.dtype])
            if len(column.arrays) == 1:
                into[:] = column.arrays[0].reshape(-1)
            else:
                np.concatenate(column.arrays, axis=None, out=into)


def write_header(view: memoryview, at: int, header: Header, descriptor: bytes = b"") -> None:
    """Write header and descriptor at byte `at` of `view`, with their checksum."""
    fields = HEADER_FIELDS.pack(_MAGIC, *header)
    crc = _CRC.pack(zlib.crc32(descriptor, zlib.crc32(fields)))
    view[at : at + HEADER_BYTES + len(descriptor)] = b"".join((fields, crc, descriptor))


def read_header(view: memoryview, at: int, pos: int, limit: int) -> tuple[Header, bytes]:
    """The checked header of the record for log offset `pos` at byte `at`, and the bytes of header and descriptor.

    `limit` is how many bytes there are up to the end of the ring. Raises CorruptData when anything disagrees.
    """
    if limit < HEADER_BYTES:
        raise CorruptData(
            f"a record must have {HEADER_BYTES} bytes for its header, got {limit} from {pos} to the ring's end."
        )
    # What is checked is what is used, though a producer may write here meanwhile.
    first = bytes(view[at : at + HEADER_BYTES])
    magic, kind, stands_at, seq, num_bytes, descriptor_bytes, epoch, attempt, wanted = _HEADER.unpack(first)
    if magic != _MAGIC or stands_at != pos:
        found = f"one for {stands_at}" if magic == _MAGIC else f"the bytes {magic.hex()}"
        raise CorruptData(f"a record must stand at log offset {pos}, got {found}. It was overwritten or never written.")
    if not HEADER_BYTES + descriptor_bytes <= num_bytes <= limit:
        raise CorruptData(
            f"the record at {pos} must have between {HEADER_BYTES} and {limit} bytes, got {num_bytes} "
            f"with a descriptor of {descriptor_bytes}."
        )
    descriptor = bytes(view[at + HEADER_BYTES : at + HEADER_BYTES + descriptor_bytes])
    crc = zlib.crc32(descriptor, zlib.crc32(first[: HEADER_FIELDS.size]))
    if crc != wanted:
        raise CorruptData(f"the record at {pos} must match its checksum {wanted:08x}, got {crc:08x}.")
    return Header(kind, pos, seq, num_bytes, descriptor_bytes, epoch, attempt), first + descriptor


def header_of(raw: bytes) -> Header:
    """Of bytes that `read_header` checked once, and whoever kept them again."""
    return Header._make(HEADER_FIELDS.unpack_from(raw)[1:])


def read_generation(view: memoryview, at: int) -> tuple[int, int]:
    """(pos, seq) of whatever stands at byte `at`, unchecked: to be compared with what stood there."""
    pos, seq = _GENERATION.unpack_from(view, at + _GENERATION_AT)
    return pos, seq


def read_descriptor(header: Header, raw: bytes) -> Descriptor:
    """Decode what `read_header` checked. Nothing in it points into the ring any more. CorruptData for what is no record, or of
    a kind that older releases wrote."""
    payload = align(len(raw))
    if header.kind != RECORD:
        raise CorruptData(f"the record at {header.pos} must be of kind {RECORD}, got {header.kind}. Write it anew")
    num_spans, make_bytes = _COUNTS.unpack_from(raw, HEADER_BYTES)
    at = HEADER_BYTES + _COUNTS.size + make_bytes
    make = _decoded(raw[HEADER_BYTES + _COUNTS.size : at])
    named = _numbers_of("q", 4 * num_spans + len(make.names)).unpack_from(raw, at)
    spans = [[*named[i : i + 4]] for i in range(0, 4 * num_spans, 4)]
    n, numbers = num_rows(spans), at + 8 * len(named)
    end = numbers + n * make.starts[-1]
    meta, shapes = orjson.loads(raw[end:]) if end < len(raw) else ({}, [])
    return Descriptor(
        spans, header.epoch, header.attempt, header.seq, make, [*named[4 * num_spans :]], n, numbers, meta, shapes,
        payload, raw,
    )  # fmt: skip


def _described(
    spans: Iterable[Sequence[int]],
    offsets: Sequence[int],
    columns: tuple[tuple[str, str, int | None], ...],
    num_lengths: int,
    numbers: Sequence[Sequence[float | None]],
    meta: Mapping[str, Any] | None,
    shapes: Sequence[Any],
) -> bytes:
    """A descriptor. `columns`: name, dtype, and which of the first `num_lengths` numbers are the lengths of its rows. Raises
    OverflowError for integers of more than 64 bits."""
    named = array("q", [number for span in spans for number in span])
    num_spans = len(named) // 4
    named.extend(offsets)
    kinds = "".join(["d" if type(field[0]) is float else "i" for field in numbers])
    try:
        encoded = _numbers_of(kinds, len(numbers[0]) if numbers else 0).pack(*chain.from_iterable(numbers))
    except struct.error:  # one is None, or has more than 32 bits
        fields = [*map(_encoded, numbers)]
        kinds, encoded = "".join([field.typecode for field in fields]), b"".join(fields)
    make = _made(num_lengths, kinds, columns)
    said = orjson.dumps([meta or {}, shapes], option=_JSON) if meta or shapes else b""
    return b"".join((_COUNTS.pack(num_spans, len(make)), make, named, encoded, said))


@lru_cache(1024)
def _made(num_lengths: int, kinds: str, columns: tuple[tuple[str, str, int | None], ...]) -> bytes:
    return orjson.dumps((num_lengths, kinds, columns))


@lru_cache(1024)
def _decoded(make: bytes) -> Make:
    num_lengths, kinds, columns = orjson.loads(make)
    starts = accumulate([struct.calcsize(kind) for kind in kinds], initial=0)
    names, dtypes, lengths = zip(*columns, strict=True) if columns else ((), (), ())
    return Make(num_lengths, kinds, tuple(starts), names, dtypes, lengths)


@lru_cache(1024)
def _numbers_of(kinds: str, n: int) -> struct.Struct:
    return struct.Struct("<" + "".join([f"{n}{kind}" for kind in kinds]))


def _encoded(field: Sequence[float | None]) -> array[Any]:
    """4 bytes a row, or 8: integers where all are, else floats, with nan for None."""
    try:
        return array("d" if type(field[0]) is float else "i", field)
    except TypeError:
        return array("d", [nan if value is None else value for value in field])
    except OverflowError:
        return array("q", field)


def column_arrays(payload: np.ndarray, layout: ColumnLayout) -> list[np.ndarray]:
    """Views of a column, one a row in its shape, of the payload (uint8) that it lies in."""
    dtype = STORAGE[layout.dtype]
    whole = payload.view(dtype)  # its length, like every offset, is a multiple of 64 bytes
    ends = accumulate(layout.sizes(), initial=layout.offset // dtype.itemsize)
    arrays = [whole[start:end] for start, end in pairwise(ends)]
    if layout.shapes is not None:
        arrays = [array.reshape(shape) for array, shape in zip(arrays, layout.shapes, strict=True)]
    return arrays


def _descriptor_limit(n: int, names: Iterable[str], meta_bytes: int, fields: int = _FIELDS) -> int:
    limit = _COUNTS.size + _NUMBER_BYTES + len(b'[,"",[]][,[]]') + meta_bytes + fields + n * (_SPAN_BYTES + 8 * fields)
    for name in names:
        limit += _column_bytes(name) + n * _SHAPE_BYTES
    return limit


@cache
def _column_bytes(name: str) -> int:
    """Its name and dtype, which lengths it has and their type, and its offset."""
    return len(b'[,"",null],[],') + len(orjson.dumps(name)) + _DTYPE_BYTES + _NUMBER_BYTES + 1 + 8


def _column_fault(column: Column, n: int) -> str:
    if column.dtype not in STORAGE:
        return f"the dtype of column {column.name} must be one of {', '.join(STORAGE)}, got {column.dtype}."
    if len(column.arrays if column.lengths is None else column.lengths) != n:
        what, num = ("array", len(column.arrays)) if column.lengths is None else ("length", len(column.lengths))
        return f"column {column.name} must have one {what} a row, got {num} for {n} rows."
    wanted = STORAGE[column.dtype]
    wrong = [(row, array.dtype) for row, array in enumerate(column.arrays) if array.dtype != wanted]
    if not wrong:
        size = sum(array.size for array in column.arrays)
        return f"the lengths of column {column.name} must be positive and together {size}, got {column.lengths!r:.200}."
    row, found = wrong[0]
    return f"arrays of column {column.name} ({column.dtype}) must have dtype {wanted}, got {found} in row {row}."


def _record_fault(columns: Sequence[Column], num_bytes: int) -> str:
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        return f"the columns of a record must have different names, got {', '.join(names)}."
    return (
        f"the shapes of a record must have at most 4 dimensions and its rows 64-bit ids, got a descriptor of {num_bytes} "
        f"bytes with the columns {', '.join(names)}."
    )
