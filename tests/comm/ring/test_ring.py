from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.comm.ring.records import GROUP_BLOB, STORAGE, Column, read_header, record_bytes, write_header
from rondo.comm.ring.ring import CONTROL_BYTES, RecordRef, RingTail, RingView, RingWriter, fits, place, ring_bytes
from rondo.comm.ring.words import drain, new_doorbell
from rondo.runtime.errors import CorruptData, OutOfSpace
from tests.comm.memory import MemorySegment, TestRing, tokens
from tests.strength import strength

quick = settings(deadline=None, derandomize=True, database=None)


def put(ring: TestRing, group: int, *lengths: int) -> RecordRef:
    return ring.writer.put([(group, 0, 0, len(lengths))], [tokens(*lengths, first=group)], epoch=0, attempt=0)


def one_row_of(num_bytes: int) -> Column:
    """A column whose record of one row takes exactly `num_bytes`."""
    overhead = record_bytes([(0, 0, 0, 1)], [Column("x", "uint8", [np.zeros(128, np.uint8)])]) - 128
    column = Column("x", "uint8", [np.zeros(num_bytes - overhead, np.uint8)])
    assert record_bytes([(0, 0, 0, 1)], [column]) == num_bytes
    return column


def put_bytes(ring: TestRing, num_bytes: int) -> RecordRef:
    return ring.writer.put([(0, 0, 0, 1)], [one_row_of(num_bytes)], epoch=0, attempt=0)


def drop(ring: TestRing, ref: RecordRef) -> None:
    ring.tail.poll()
    ring.tail.release(ref.pos + ref.num_bytes)


# ---- what is put is what is read ------------------------------------------------------------------------------------


@st.composite
def jagged(draw: st.DrawFn) -> list[Column]:
    num_rows = draw(st.integers(1, 5))
    columns = []
    for i, dtype in enumerate(draw(st.lists(st.sampled_from(list(STORAGE)), max_size=4))):
        shapes = [tuple(draw(st.lists(st.integers(0, 5), max_size=3))) for _ in range(num_rows)]
        random = np.random.default_rng(draw(st.integers(0, 1000)))
        raw = [random.integers(0, 2, (*shape, STORAGE[dtype].itemsize), np.uint8) for shape in shapes]
        columns.append(Column(f"c{i}", dtype, [a.view(STORAGE[dtype])[..., 0] for a in raw]))
    return columns or [tokens(*[3] * num_rows)]


@given(st.lists(jagged(), min_size=1, max_size=4))
@quick
def test_every_row_comes_back_as_it_was_put_in_order(puts: list[list[Column]]) -> None:
    ring = TestRing(1 << 16)
    for group, columns in enumerate(puts):
        ring.writer.put([(group, 0, 0, len(columns[0].arrays))], columns, epoch=4, attempt=1)
    seen = ring.tail.poll()
    assert [descriptor.spans[0][0] for _, descriptor in seen] == list(range(len(puts)))
    for (ref, descriptor), columns in zip(seen, puts, strict=True):
        record = ring.view.read(ref.pos, ref.seq)
        assert record.descriptor == descriptor and (descriptor.epoch, descriptor.attempt) == (4, 1)
        assert (record.ref.pos, record.ref.num_bytes) == (ref.pos, ref.num_bytes)
        for column in columns:
            assert record.dtype(column.name) == column.dtype
            for row, array in enumerate(column.arrays):
                found = record.column(column.name, row)
                assert found.dtype == array.dtype and found.shape == array.shape
                assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("row_bytes", [100, 300_000])
def test_rows_that_are_not_contiguous_are_put_like_any_other(row_bytes: int) -> None:
    matrix = np.arange(row_bytes * 2, dtype=np.int64).reshape(-1, 2)
    arrays = [matrix[:, 0], matrix[::-1, 1], matrix.T]
    ring = TestRing(1 << 25)
    ref = ring.writer.put([(0, 0, 0, 3)], [Column("m", "int64", arrays)], epoch=0, attempt=0)
    record = ring.view.read(ref.pos, ref.seq)
    for row, array in enumerate(arrays):
        np.testing.assert_array_equal(record.column("m", row), array)


def test_a_packed_column_comes_back_row_by_row_and_in_one_piece() -> None:
    values, lengths = np.arange(12, dtype=np.int32), [5, 0, 7]
    pieces = Column("tokens", "int32", [values[:4], values[4:]], lengths)
    ring = TestRing(1 << 16)
    ref = ring.writer.put(
        [(0, 0, 0, 3)], [pieces, Column("apart", "int32", tokens(*lengths).arrays)], epoch=0, attempt=0
    )
    record = ring.view.read(ref.pos, ref.seq)
    assert [array.tolist() for array in record.arrays("tokens")] == [[0, 1, 2, 3, 4], [], [5, 6, 7, 8, 9, 10, 11]]
    whole, found = record.packed("tokens")
    assert whole.tolist() == values.tolist() and list(found) == lengths and not whole.flags.writeable
    np.testing.assert_array_equal(record.packed("apart")[0], np.concatenate(record.arrays("apart")))


def test_long_rows_beside_short_ones_come_back() -> None:
    pixels = [np.full((300, 1176), value, np.float32) for value in range(4)]
    ring = TestRing(1 << 24)
    columns = [tokens(5, 0, 7, 2), Column("pixel_values", "float32", pixels)]
    ref = ring.writer.put([(0, 0, 0, 4)], columns, epoch=0, attempt=0)
    record = ring.view.read(ref.pos, ref.seq)
    for row in range(4):
        np.testing.assert_array_equal(record.column("pixel_values", row), pixels[row])
        np.testing.assert_array_equal(record.column("tokens", row), columns[0].arrays[row])


def test_a_short_record_after_a_long_one_carries_nothing_of_it() -> None:
    ring = TestRing(1 << 16)
    put(ring, 1, 500, 500)
    ref = ring.writer.put(
        [(2, 0, 0, 1)], [tokens(0), Column("b", "uint8", [np.zeros(0, np.uint8)])], epoch=0, attempt=0
    )
    record = ring.view.read(ref.pos, ref.seq)
    assert record.column("tokens", 0).shape == record.column("b", 0).shape == (0,)


def test_a_group_blob_is_a_row_with_the_sample_minus_one() -> None:
    ring = TestRing(4096)
    ring.writer.put([(9, 0, GROUP_BLOB, 1)], [tokens(3)], epoch=0, attempt=0, meta={"hash": "ab"})
    [(_, descriptor)] = ring.tail.poll()
    assert descriptor.spans == [[9, 0, -1, 1]] and descriptor.meta == {"hash": "ab"}


def test_a_reader_views_the_ring_itself_and_cannot_write_to_it() -> None:
    ring = TestRing(4096)
    ref = put(ring, 0, 4)
    array = ring.view.read(ref.pos, ref.seq).column("tokens", 0)
    mapped = np.frombuffer(ring.segment.view(readonly=True), np.uint8)
    assert np.shares_memory(array, mapped)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_an_unknown_column_is_named_with_those_that_are_there() -> None:
    ring = TestRing(4096)
    ref = put(ring, 0, 4)
    with pytest.raises(KeyError, match="column reward must be in the record, which has tokens"):
        ring.view.read(ref.pos, ref.seq).arrays("reward")


# ---- order, wake-ups, restarts --------------------------------------------------------------------------------------


def test_a_record_is_seen_once() -> None:
    ring = TestRing(4096)
    assert ring.tail.poll() == []
    first = put(ring, 0, 4)
    assert [ref for ref, _ in ring.tail.poll()] == [first]
    second, third = put(ring, 1, 4), put(ring, 2, 4)
    assert [ref for ref, _ in ring.tail.poll()] == [second, third]
    assert ring.tail.poll() == []
    assert first.seq < second.seq < third.seq and first.pos < second.pos < third.pos


def test_every_put_rings_the_doorbell_and_a_refused_one_does_not() -> None:
    doorbell = new_doorbell()
    ring = TestRing(2048, doorbell)
    put(ring, 0, 4)
    put(ring, 1, 4)
    assert drain(doorbell) == 2
    with pytest.raises(OutOfSpace):
        put(ring, 2, 1000)
    assert drain(doorbell) == 0
    os.close(doorbell)


def test_a_fresh_segment_is_an_empty_ring_for_whoever_comes_first() -> None:
    segment = MemorySegment(ring_bytes(4096))
    view, tail = RingView(segment, "r"), RingTail(segment, "r")
    assert (tail.head, tail.tail, tail.capacity, tail.poll()) == (0, 0, 4096, [])
    ref = RingWriter(segment, None, "r").put([(0, 0, 0, 1)], [tokens(2)], epoch=0, attempt=0)
    assert tail.poll()[0][0] == ref
    assert view.read(ref.pos, ref.seq).column("tokens", 0).tolist() == [0, 1]


def test_the_next_incarnation_takes_over_at_the_head() -> None:
    ring = TestRing(4096)
    old = put(ring, 0, 4)
    ring.writer = RingWriter(ring.segment, None, "ring/test")
    new = put(ring, 1, 4)
    assert new.pos == old.pos + old.num_bytes and new.seq > old.seq
    assert [ref for ref, _ in ring.tail.poll()] == [old, new]


def test_a_restarted_coordinator_goes_on_at_its_journalled_cursor() -> None:
    ring = TestRing(4096)
    put(ring, 0, 4)
    ring.tail.poll()
    cursor = ring.tail.cursor
    missed = put(ring, 1, 4)
    again = RingTail(ring.segment, "ring/test", cursor)
    assert [ref for ref, _ in again.poll()] == [missed]
    assert len(RingTail(ring.segment, "ring/test").poll()) == 2  # without a journal: everything not released


def test_a_cursor_outside_the_ring_is_refused() -> None:
    ring = TestRing(4096)
    ref = put(ring, 0, 4)
    with pytest.raises(CorruptData) as error:
        RingTail(ring.segment, "ring/test", 6400)
    assert str(error.value) == (
        f"the cursor of ring ring/test must lie between tail 0 and head {ref.num_bytes}, got 6400."
    )


def test_a_damaged_record_stops_the_cursor_before_it() -> None:
    ring = TestRing(4096)
    put(ring, 0, 4)
    damaged = put(ring, 1, 4)
    ring.segment.view()[4096 + damaged.pos + 70] ^= 1
    for _ in range(2):
        with pytest.raises(CorruptData, match="must match its checksum"):
            ring.tail.poll()
    assert ring.tail.cursor == damaged.pos


def test_a_segment_that_holds_something_else_is_refused() -> None:
    segment = MemorySegment(ring_bytes(4096), name="weights")
    segment.view()[0] = 1
    with pytest.raises(CorruptData, match="segment weights must hold a ring, got the mark 0x1"):
        RingWriter(segment, None, "r")


def test_a_segment_without_room_for_a_record_is_refused() -> None:
    with pytest.raises(ValueError, match="a ring's segment must have at least 4224 bytes, got 4096"):
        RingView(MemorySegment(4096), "r")


def test_closing_the_three_sides_lets_the_segment_close() -> None:
    ring = TestRing(4096)
    put(ring, 0, 4)
    ring.tail.poll()
    with pytest.raises(BufferError):
        ring.segment.close()
    ring.writer.close()
    ring.tail.close()
    ring.view.close()
    ring.segment.close()


# ---- space, laps and generations ------------------------------------------------------------------------------------


def test_a_record_that_meets_the_end_starts_the_next_lap_behind_a_pad() -> None:
    ring = TestRing(1024)
    first = put_bytes(ring, 640)
    drop(ring, first)
    second = put_bytes(ring, 512)
    assert second.pos == 1024
    assert [ref for ref, _ in ring.tail.poll()] == [second]
    assert ring.view.read(second.pos, second.seq).column("x", 0).ctypes.data % 64 == 0
    assert ring.tail.head - ring.tail.tail == 512 + 384  # the pad counts until the record behind it is released
    drop(ring, second)
    assert ring.tail.head == ring.tail.tail == 1536


def test_a_record_that_ends_with_the_data_needs_no_pad() -> None:
    ring = TestRing(1024)
    assert put_bytes(ring, 640).pos == 0
    assert put_bytes(ring, 384).pos == 640
    drop(ring, RecordRef("", 0, 0, 640))
    assert put_bytes(ring, 320).pos == 1024


def test_a_put_without_room_raises_and_changes_nothing() -> None:
    ring = TestRing(1024)
    first = put_bytes(ring, 640)
    before = bytes(ring.segment.view())
    with pytest.raises(OutOfSpace) as error:
        put_bytes(ring, 512)
    assert str(error.value) == (
        "a put into ring ring/test must fit a reservation, got 512 bytes (and a pad of 384) beside 640 of 1024 in use. "
        "Reserve worst_case_bytes first."
    )
    assert bytes(ring.segment.view()) == before
    drop(ring, first)
    assert put_bytes(ring, 512).pos == 1024


def test_thousands_of_laps_keep_every_record_whole() -> None:
    ring = TestRing(8192)
    random = np.random.default_rng(0)
    for group in range(2000):
        lengths = random.integers(0, 300, random.integers(1, 4))
        ref = put(ring, group, *lengths)
        [(seen, descriptor)] = ring.tail.poll()
        assert seen == ref and descriptor.spans == [[group, 0, 0, len(lengths)]]
        record = ring.view.read(ref.pos, ref.seq)
        found = np.concatenate(record.arrays("tokens"))
        assert found.tolist() == list(range(group, group + lengths.sum()))
        assert record.valid()
        ring.tail.release(ref.pos + ref.num_bytes)
    assert ring.tail.head > 100 * 8192 and ring.tail.head == ring.tail.tail


def test_a_record_is_valid_until_it_is_released() -> None:
    ring = TestRing(4096)
    first, second = put(ring, 0, 4), put(ring, 1, 4)
    record, other = ring.view.read(first.pos, first.seq), ring.view.read(second.pos, second.seq)
    assert record.valid() and other.valid()
    drop(ring, first)
    assert not record.valid() and other.valid()
    with pytest.raises(CorruptData, match="the record at 0 of ring ring/test must not be released, got a tail of"):
        ring.view.read(first.pos, first.seq)


def test_memory_that_was_overwritten_under_a_reader_is_noticed() -> None:
    ring = TestRing(1024)
    first = put_bytes(ring, 640)
    record = ring.view.read(first.pos, first.seq)
    drop(ring, first)
    put_bytes(ring, 512)
    ring.segment.view()[128:136] = bytes(8)  # were the tail still at 0, the generation in memory would tell
    assert ring.tail.tail == 0
    assert not record.valid()
    with pytest.raises(CorruptData, match="must stand at log offset 0, got one for 1024"):
        ring.view.read(first.pos, first.seq)


def test_another_generation_at_the_same_place_is_noticed() -> None:
    ring = TestRing(4096)
    ref = put(ring, 0, 4)
    record = ring.view.read(ref.pos, ref.seq)
    data = ring.segment.view()[CONTROL_BYTES:]
    header, descriptor = read_header(data, ref.pos, ref.pos, 4096)
    write_header(data, ref.pos, header._replace(seq=ref.seq + 1), bytes(descriptor))
    assert not record.valid()


def test_a_reader_that_names_another_generation_is_refused() -> None:
    ring = TestRing(4096)
    ref = put(ring, 0, 4)
    with pytest.raises(CorruptData, match="the record at 0 of ring ring/test must be generation 2, got 1"):
        ring.view.read(ref.pos, ref.seq + 1)
    with pytest.raises(CorruptData):
        ring.view.read(ref.pos + 64, ref.seq)


def test_an_older_release_changes_nothing_and_one_beyond_the_cursor_is_refused() -> None:
    ring = TestRing(4096)
    first, second = put(ring, 0, 4), put(ring, 1, 4)
    with pytest.raises(ValueError, match=r"must end a record seen so far \(cursor 0\)"):
        ring.tail.release(first.num_bytes)
    ring.tail.poll()
    ring.tail.release(second.pos)
    ring.tail.release(0)
    assert ring.tail.tail == second.pos


# ---- promises -------------------------------------------------------------------------------------------------------


def test_an_empty_ring_can_be_promised_whole() -> None:
    assert fits(1024, 0, 0, [], 1024)
    assert fits(1024, 0, 0, [512, 256], 256)
    assert not fits(1024, 0, 0, [512, 256], 320)
    assert fits(1024, 2048, 2048, [1024 - 64], 64)


def test_a_promise_counts_the_pad_it_may_need() -> None:
    # 384 bytes are left of the lap: a record of 512 skips them all, one of 128 at most 64 of them.
    assert fits(1024, 640, 640, [], 640)
    assert not fits(1024, 640, 640, [], 704)
    assert fits(1024, 640, 640, [128] * 6, 128)
    assert not fits(1024, 640, 640, [128] * 7, 128)
    assert fits(1024, 640, 640, [128] * 2, 128)


def test_a_promise_that_ends_before_the_lap_needs_no_pad() -> None:
    assert fits(1024, 1088, 256, [128], 64)
    assert not fits(1024, 1088, 256, [128], 128)


sizes = st.integers(1, 20).map(lambda n: n * 64)


@given(st.sampled_from([1024, 1600, 2048]), st.integers(0, 200), st.data())
@settings(quick, max_examples=strength(quick=50, full=150))
def test_no_put_under_a_granted_promise_is_ever_out_of_space(capacity: int, start: int, data: st.DataObject) -> None:
    """Grants, puts (smaller than promised, whole or in parts, any order) and releases, interleaved at will.

    The one who grants sees puts late: `known` and `seen` are its view of the promises and of the head.
    """
    head = seen = tail = start * 64
    promises: dict[int, int] = {}
    known: dict[int, int] = {}
    ends: list[int] = []
    for number in range(40):
        action = data.draw(st.sampled_from(["grant", "grant", "put", "put", "look", "release", "cancel"]))
        if action == "grant":
            request = data.draw(sizes)
            if fits(capacity, seen, tail, list(known.values()), request):
                promises[number] = known[number] = request
        elif action == "put" and promises:
            which = data.draw(st.sampled_from(list(promises)))
            num_bytes = data.draw(st.integers(1, promises[which] // 64)) * 64
            promises[which] -= num_bytes
            if not promises[which] or data.draw(st.booleans()):
                del promises[which]
            pos = place(capacity, head, num_bytes)
            head = pos + num_bytes
            ends.append(head)
            assert pos % capacity + num_bytes <= capacity
            assert head <= tail + capacity
        elif action == "look":
            known, seen = dict(promises), head
        elif action == "release" and ends and ends[0] <= seen:
            tail = ends.pop(0)
        elif action == "cancel" and promises:
            promises.pop(data.draw(st.sampled_from(list(promises))))


@given(st.data())
@settings(quick, max_examples=strength(quick=30, full=60))
def test_the_writer_itself_never_runs_out_under_granted_promises(data: st.DataObject) -> None:
    ring = TestRing(2048)
    promises: list[int] = []
    ends: list[int] = []
    for _ in range(25):
        action = data.draw(st.sampled_from(["grant", "put", "put", "release"]))
        if action == "grant":
            request = data.draw(st.integers(5, 20)) * 64
            if fits(2048, ring.tail.head, ring.tail.tail, promises, request):
                promises.append(request)
        elif action == "put" and promises:
            promise = promises.pop(data.draw(st.integers(0, len(promises) - 1)))
            ref = put_bytes(ring, data.draw(st.integers(5, promise // 64)) * 64)
            ends.append(ref.pos + ref.num_bytes)
            ring.tail.poll()
        elif action == "release" and ends:
            ring.tail.release(ends.pop(0))


@given(st.integers(1, 40), st.lists(sizes, max_size=5), sizes, st.integers(0, 100))
@quick
def test_what_is_granted_beside_others_is_granted_alone(
    capacity: int, reserved: list[int], request: int, start: int
) -> None:
    if fits(capacity * 64, start * 64, start * 64, reserved, request):
        assert all(fits(capacity * 64, start * 64, start * 64, [], promise) for promise in [*reserved, request])
