"""How a record lies in memory: header, descriptor, one extent a column.

Owns the layout, its sizes and its checks; not where records go (`ring.py`) and not what columns mean (`bus.py`).

    | header 64 B | descriptor | 0..63 B | extent of column 0 | 0..63 B | extent of column 1 | ...
                                         ^ payload, 64-byte aligned; the rows of a column lie end to end

Rows are jagged: a column has one array a row, of any shape; empty and 0-d arrays are fine. The descriptor names the
rows as spans (`spans.py`), and for every column its dtype, its offset from the payload and the shape of each row. Sizes come from
the shapes alone, and `num_bytes` counts the whole record as it lies in the ring, a multiple of 64.

    descriptor = 3 counts, uint32 | spans, int64 [num, 4] | lengths, int64 [num, rows] | info, 8 bytes [num, rows] | JSON

Whatever there is one of a row is a number of 8 bytes: lengths, once for all columns that have the same, and what the put says of
its rows. JSON names the columns and holds what is said of the record (and shapes, where rows have not one dimension).

Invariant: nothing is read out of a record before its magic, its position and the CRC-32 over header and descriptor
agree. Payload bytes carry no checksum here: shared memory does not lose bits, generations catch what is overwritten, `words.py`
orders what is read early, and a CRC-32 (2.7 GB/s) at the put and at the read would cost more than all else that the bus does with
a row. What crosses a network has one (`links/`).

    columns = [Column("tokens", "int32", [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)])]
    record_bytes([(7, 0, 0, 2)], columns)  # two rows: samples 0 and 1 of group 7, part 0 of each
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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

RECORD, PAD = 1, 2
_MAGIC = b"RREC"
HEADER_FIELDS = struct.Struct("<4sIQQQIqq")  # magic, kind, pos, seq, bytes, descriptor bytes, epoch, attempt
_CRC = struct.Struct("<I8x")  # of the fields and the descriptor
_GENERATION = struct.Struct("<QQ")  # pos, seq
_GENERATION_AT = 8
_JSON = orjson.OPT_SERIALIZE_NUMPY
_COUNTS = struct.Struct("<III")  # spans, lists of lengths, fields of info

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
    int64 in its descriptor), or of `shapes` where some row has not exactly one dimension."""

    name: str
    dtype: str
    offset: int
    lengths: Sequence[int] | None
    shapes: list[list[int]] | None = None

    def sizes(self) -> Sequence[int]:
        """Elements of every row."""
        return self.lengths if self.lengths is not None else [prod(shape) for shape in self.shapes or ()]


class Descriptor(NamedTuple):
    """What a record says about itself. `spans` name its rows; `payload` is its offset in the record, in bytes."""

    spans: list[list[int]]
    epoch: int
    attempt: int
    seq: int
    columns: list[ColumnLayout]
    meta: dict[str, Any]
    payload: int
    info: list[memoryview[Any]] = []  # noqa: RUF012 - int64 or float64 [rows] for each field that is said of rows; nan is None


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
    layouts: list[tuple[Any, ...]] = []
    extents: list[tuple[int, int]] = []
    different: list[Sequence[int]] = []  # lists of lengths
    offset = 0
    for column in columns:
        arrays, lengths, dtype = column.arrays, column.lengths, STORAGE.get(column.dtype)
        # Most arrays have the very dtype object; comparing others costs more.
        wrong = dtype is None or [a for a in arrays if a.dtype is not dtype and a.dtype != dtype]
        if dtype is None or wrong or len(arrays if lengths is None else lengths) != n:
            raise ValueError(_column_fault(column, n))
        if lengths is None and [array.ndim for array in arrays].count(1) == n:
            lengths = [len(array) for array in arrays]
        elif lengths is not None and (min(lengths) < 0 or sum(lengths) != sum([array.size for array in arrays])):
            raise ValueError(_column_fault(column, n))
        if lengths is not None:
            if lengths not in different:
                different.append(lengths)
            layouts.append((column.name, column.dtype, offset, different.index(lengths)))
            num_bytes = sum(lengths) * dtype.itemsize
        else:
            layouts.append((column.name, column.dtype, offset, None, [array.shape for array in arrays]))
            num_bytes = sum([array.nbytes for array in arrays])
        extents.append((offset, num_bytes))
        offset = align(offset + num_bytes)
    numbers = [*map(_numbers, info)]
    said = orjson.dumps(["".join([each.typecode for each in numbers]), layouts, meta or {}], option=_JSON)
    counts = _COUNTS.pack(len(spans), len(different), len(numbers))
    try:
        named = [array("q", chain.from_iterable(spans)), *[array("q", lengths) for lengths in different]]
    except OverflowError as error:
        raise ValueError(_record_fault(columns, 0)) from error
    if [field for field in numbers if len(field) != n]:
        raise ValueError(f"what is said of rows must have {n} numbers a field, got {list(map(len, numbers))}.")
    descriptor = b"".join((counts, *named, *numbers, said))
    names = {layout[0] for layout in layouts}
    if len(names) != len(layouts) or (
        len(descriptor) > _descriptor_limit(n, names, 0, len(info))
        and len(descriptor) > _descriptor_limit(n, names, len(orjson.dumps(meta or {}, option=_JSON)), len(info))
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
            np.concatenate(column.arrays, axis=None, out=into)


def write_header(view: memoryview, at: int, header: Header, descriptor: bytes = b"") -> None:
    """Write header and descriptor at byte `at` of `view`, with their checksum."""
    fields = HEADER_FIELDS.pack(_MAGIC, *header)
    crc = _CRC.pack(zlib.crc32(descriptor, zlib.crc32(fields)))
    view[at : at + HEADER_BYTES + len(descriptor)] = b"".join((fields, crc, descriptor))


def read_header(view: memoryview, at: int, pos: int, limit: int) -> tuple[Header, bytes]:
    """The checked header of the record for log offset `pos` at byte `at`, and its descriptor's bytes.

    `limit` is how many bytes there are up to the end of the ring. Raises CorruptData when anything disagrees.
    """
    if limit < HEADER_BYTES:
        raise CorruptData(
            f"a record must have {HEADER_BYTES} bytes for its header, got {limit} from {pos} to the ring's end."
        )
    # What is checked is what is used, though a producer may write here meanwhile.
    first = bytes(view[at : at + HEADER_BYTES])
    magic, *fields = HEADER_FIELDS.unpack_from(first)
    header = Header._make(fields)
    if magic != _MAGIC or header.pos != pos:
        found = f"one for {header.pos}" if magic == _MAGIC else f"the bytes {magic.hex()}"
        raise CorruptData(f"a record must stand at log offset {pos}, got {found}. It was overwritten or never written.")
    if not HEADER_BYTES + header.descriptor_bytes <= header.num_bytes <= limit:
        raise CorruptData(
            f"the record at {pos} must have between {HEADER_BYTES} and {limit} bytes, got {header.num_bytes} "
            f"with a descriptor of {header.descriptor_bytes}."
        )
    descriptor = bytes(view[at + HEADER_BYTES : at + HEADER_BYTES + header.descriptor_bytes])
    (wanted,) = _CRC.unpack_from(first, HEADER_FIELDS.size)
    crc = zlib.crc32(descriptor, zlib.crc32(first[: HEADER_FIELDS.size]))
    if crc != wanted:
        raise CorruptData(f"the record at {pos} must match its checksum {wanted:08x}, got {crc:08x}.")
    return header, descriptor


def read_generation(view: memoryview, at: int) -> tuple[int, int]:
    """(pos, seq) of whatever stands at byte `at`, unchecked: to be compared with what stood there."""
    pos, seq = _GENERATION.unpack_from(view, at + _GENERATION_AT)
    return pos, seq


def read_descriptor(header: Header, descriptor: bytes) -> Descriptor:
    """Decode what `read_header` checked. Nothing in it points into the ring any more."""
    payload = align(HEADER_BYTES + header.descriptor_bytes)
    if descriptor[:1] == b"{":
        return _read_json(header, descriptor, payload)
    num_spans, num_lengths, num_info = _COUNTS.unpack_from(descriptor)
    bytes_, at = memoryview(descriptor), _COUNTS.size + 32 * num_spans
    flat = bytes_[_COUNTS.size : at].cast("q").tolist()
    spans = [flat[i : i + 4] for i in range(0, len(flat), 4)]
    n = num_rows(spans)
    end = at + 8 * n * (num_lengths + num_info)
    kinds, layouts, meta = orjson.loads(bytes_[end:])
    numbers = bytes_[at:end].cast("q")
    of = [numbers[i : i + n] for i in range(0, len(numbers), n)]
    columns = [
        ColumnLayout(name, dtype, offset, None if same is None else of[same], *shapes)
        for name, dtype, offset, same, *shapes in layouts
    ]
    info = [
        each if kind == "q" else each.cast("B").cast("d") for each, kind in zip(of[num_lengths:], kinds, strict=True)
    ]
    return Descriptor(spans, header.epoch, header.attempt, header.seq, columns, meta, payload, info)


def _read_json(header: Header, descriptor: bytes, payload: int) -> Descriptor:
    """As the first releases wrote it, to files that people kept."""
    fields = orjson.loads(descriptor)
    columns: list[ColumnLayout] = []
    for name, dtype, offset, lengths, *shapes in fields["columns"]:
        same = columns[lengths].lengths if type(lengths) is int else lengths
        columns.append(ColumnLayout(name, dtype, offset, same, *shapes))
    return Descriptor(fields["spans"], header.epoch, header.attempt, header.seq, columns, fields["meta"], payload)


def numbers_of(field: memoryview) -> list[float | None]:
    """What a descriptor says of its rows, one field of it."""
    values: list[Any] = field.tolist()
    if field.format == "q" or isfinite(sum(values)):
        return values
    return [value if isfinite(value) else None for value in values]


def _numbers(field: Sequence[float | None]) -> array[Any]:
    """8 bytes a row: integers where all are, else floats, with nan for None."""
    try:
        return array("q", field)
    except TypeError:
        return array("d", field if None not in field else [nan if value is None else value for value in field])


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
    limit = _COUNTS.size + len(b'["qqqqqqqq",[],]') + meta_bytes + n * (_SPAN_BYTES + 8 * fields)
    for name in names:
        limit += _column_bytes(name) + n * _SHAPE_BYTES
    return limit


@cache
def _column_bytes(name: str) -> int:
    return len(b'[,"",,null,[]],') + len(orjson.dumps(name)) + _DTYPE_BYTES + _NUMBER_BYTES


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
