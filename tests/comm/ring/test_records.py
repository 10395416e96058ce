from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.comm.ring.records import (
    RECORD,
    STORAGE,
    Column,
    ColumnLayout,
    Header,
    align,
    plan,
    read_descriptor,
    read_header,
    record_bytes,
    worst_case_bytes,
    write_header,
)
from rondo.comm.ring.spans import num_rows
from rondo.runtime.errors import CorruptData
from tests.comm.memory import tokens

SPANS = [(7, 0, 0, 2)]
quick = settings(deadline=None, derandomize=True, database=None)


def written(columns: list[Column], *, pos: int = 640) -> tuple[bytearray, Header]:
    """A record's header and descriptor in plain memory, payload left out."""
    record = plan(SPANS, columns, {"reservation": "group.7.1"}, [[8, 2**40], [0.5, None]])
    memory = bytearray(record.num_bytes)
    header = Header(RECORD, pos, 3, record.num_bytes, len(record.descriptor), 2, 1)
    write_header(memoryview(memory), 0, header, record.descriptor)
    return memory, header


def test_a_descriptor_says_what_was_put() -> None:
    memory, _ = written([tokens(5, 0), Column("value é", "bfloat16", [np.zeros((2, 3), np.uint16)] * 2)])
    header, text = read_header(memoryview(memory), 0, 640, len(memory))
    descriptor = read_descriptor(header, text)
    assert descriptor.spans == [[7, 0, 0, 2]]
    assert (descriptor.epoch, descriptor.attempt, descriptor.seq) == (2, 1, 3)
    assert descriptor.meta == {"reservation": "group.7.1"}
    assert [*map(list, descriptor.info())] == [[8, 2**40], [0.5, None]]
    tokens_, values = descriptor.columns
    assert (tokens_.name, tokens_.dtype, tokens_.offset, list(tokens_.sizes())) == ("tokens", "int32", 0, [5, 0])
    assert values == ColumnLayout("value é", "bfloat16", 64, None, [[2, 3], [2, 3]])
    assert descriptor.payload == align(64 + header.descriptor_bytes)


def test_a_record_of_a_kind_that_older_releases_wrote_is_refused() -> None:
    record = plan(SPANS, [tokens(5, 3)])
    header = Header(1, 128, 1, record.num_bytes, len(record.descriptor), 0, 0)
    with pytest.raises(CorruptData, match=r"the record at 128 must be of kind 3, got 1\. Write it anew"):
        read_descriptor(header, bytes(64) + record.descriptor)


def test_a_record_may_have_any_number_of_spans() -> None:
    """Of 123 the first byte is that of a brace."""
    spans = [[group, 0, 0, 1] for group in range(123)]
    record = plan(spans, [tokens(*[2] * 123)])
    header = Header(RECORD, 0, 1, record.num_bytes, len(record.descriptor), 0, 0)
    assert read_descriptor(header, bytes(64) + record.descriptor).spans == spans


def test_what_is_said_of_rows_has_a_number_for_each() -> None:
    with pytest.raises(ValueError, match=r"what is said of rows must have 2 numbers a field, got \[2, 1\]\."):
        plan(SPANS, [tokens(1, 1)], {}, [[1, 2], [3]])


def test_every_wrong_bit_in_header_or_descriptor_is_refused() -> None:
    memory, header = written([tokens(5, 3)])
    covered = [*range(56), *range(64, 64 + header.descriptor_bytes)]
    for byte in covered:
        for bit in range(8):
            memory[byte] ^= 1 << bit
            with pytest.raises(CorruptData):
                read_header(memoryview(memory), 0, 640, len(memory))
            memory[byte] ^= 1 << bit
    read_header(memoryview(memory), 0, 640, len(memory))


def test_a_record_written_for_another_position_is_refused() -> None:
    memory, _ = written([tokens(1, 1)])
    with pytest.raises(CorruptData) as error:
        read_header(memoryview(memory), 0, 704, len(memory))
    assert str(error.value) == (
        "a record must stand at log offset 704, got one for 640. It was overwritten or never written."
    )


def test_memory_that_holds_no_record_is_refused() -> None:
    with pytest.raises(CorruptData, match="got the bytes 00000000"):
        read_header(memoryview(bytes(64)), 0, 0, 64)


def test_a_record_that_would_leave_the_ring_is_refused_before_it_is_read() -> None:
    memory, header = written([tokens(1, 1)])
    with pytest.raises(CorruptData, match=f"between 64 and {header.num_bytes - 64} bytes, got {header.num_bytes}"):
        read_header(memoryview(memory), 0, 640, header.num_bytes - 64)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            [Column("tokens", "int32", [np.zeros(2, np.int32), np.zeros(2, np.int64)])],
            "arrays of column tokens (int32) must have dtype int32, got int64 in row 1.",
        ),
        (
            [Column("values", "bfloat16", [np.zeros(2, np.float32)] * 2)],
            "arrays of column values (bfloat16) must have dtype uint16, got float32 in row 0.",
        ),
        (
            [Column("tokens", "int32", [np.zeros(2, ">i4")] * 2)],
            "arrays of column tokens (int32) must have dtype int32, got >i4 in row 0.",
        ),
        (
            [Column("tokens", "int32", [np.zeros(2, np.int32)], [2])],
            "column tokens must have one length a row, got 1 for 2 rows.",
        ),
        (
            [Column("tokens", "int32", [np.zeros(2, np.int32)], [3, -1])],
            "the lengths of column tokens must be positive and together 2, got [3, -1].",
        ),
        (
            [Column("tokens", "int32", [np.zeros(2, np.int32)], [2, 1])],
            "the lengths of column tokens must be positive and together 2, got [2, 1].",
        ),
        ([tokens(1, 1, 1)], "column tokens must have one array a row, got 3 for 2 rows."),
        ([tokens(1, 1), tokens(2, 2)], "the columns of a record must have different names, got tokens, tokens."),
    ],
)
def test_columns_that_contradict_their_rows_are_refused(columns: list[Column], text: str) -> None:
    with pytest.raises(ValueError) as error:
        plan(SPANS, columns)
    assert str(error.value) == text


def test_an_object_array_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the dtype of column tokens must be one of bool, int8, .*, got object"):
        plan(SPANS, [Column("tokens", "object", [np.array([{}])] * 2)])


def test_a_record_has_rows() -> None:
    with pytest.raises(ValueError, match=r"a record must have at least one row, got none\."):
        plan([], [])


def test_a_descriptor_longer_than_its_bound_is_refused() -> None:
    shape = (1,) * 64
    with pytest.raises(ValueError, match=r"shapes of a record must have at most 4 dimensions .* columns odd"):
        plan(SPANS * 4, [Column("odd", "int8", [np.zeros(shape, np.int8)] * 8)])


def test_a_record_may_have_no_columns_at_all() -> None:
    record = plan(SPANS, [], {"status": "failed"})
    assert record.num_bytes == align(64 + len(record.descriptor)) and not record.extents


@st.composite
def records(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[Column]]:
    """Spans with the widest ids and columns of every dtype, up to 4 dimensions, empty and 0-d included."""
    number = st.one_of(st.integers(0, 100), st.integers(-(2**63), 2**63 - 1))
    spans = draw(st.lists(st.tuples(number, number, number, st.integers(1, 3)), min_size=1, max_size=6))
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), unique=True, max_size=4))
    columns = []
    for name in names:
        dtype = draw(st.sampled_from(list(STORAGE)))
        shapes = [tuple(draw(st.lists(st.integers(0, 4), max_size=4))) for _ in range(num_rows(spans))]
        columns.append(Column(name, dtype, [np.zeros(shape, STORAGE[dtype]) for shape in shapes]))
    return spans, columns


def bounds(columns: list[Column]) -> list[tuple[str, int, int]]:
    return [(c.name, STORAGE[c.dtype].itemsize, max(array.size for array in c.arrays)) for c in columns]


@given(records(), st.dictionaries(st.text(max_size=5), st.integers(0, 2**40), max_size=4))
@quick
def test_the_worst_case_is_never_exceeded(
    record: tuple[list[tuple[int, int, int]], list[Column]], meta: dict[str, int]
) -> None:
    spans, columns = record
    meta_bytes = len(orjson.dumps(meta))
    taken = record_bytes(spans, columns, meta)
    assert taken % 64 == 0
    assert taken <= worst_case_bytes(num_rows(spans), bounds(columns), meta_bytes)
    assert record_bytes(spans, columns[1:], meta) <= worst_case_bytes(num_rows(spans), bounds(columns), meta_bytes)


def test_the_worst_case_covers_the_largest_shapes_and_ids() -> None:
    wide = np.empty((0, 999_999_999, 999_999_999, 9), np.int8)
    spans = [(2**63 - 1, -(2**63), -(2**63), 1)] * 5
    columns = [Column("w", "int8", [wide] * 5)]
    assert record_bytes(spans, columns) <= worst_case_bytes(5, [("w", 1, 0)], 2)


@given(records())
@quick
def test_one_record_never_takes_more_than_its_rows_promised_one_by_one(
    record: tuple[list[tuple[int, int, int]], list[Column]],
) -> None:
    spans, columns = record
    apart = [worst_case_bytes(1, bounds(columns), 64)] * num_rows(spans)
    assert worst_case_bytes(num_rows(spans), bounds(columns), 64) <= sum(apart)
    assert record_bytes(spans, columns) <= sum(apart)
