"""The ring between real processes: producers that are killed, readers that map it read-only, wake-ups by doorbell."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from rondo.comm.ring import ring as ring_module
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import RingTail, RingView, RingWriter, ring_bytes
from rondo.comm.ring.words import Words, drain, new_doorbell
from tests.comm.memory import MemorySegment, start_child, tokens

HERE = "tests.comm.ring.test_ring_processes"
CAPACITY = 1 << 20


def row(group: int) -> Column:
    """What every producer here puts for a group: checkable from the group's number alone."""
    return tokens(100 + group % 50, first=group)


def put_groups(segment_fd: int, doorbell_fd: int, first: int, count: int) -> None:
    writer = RingWriter(MemorySegment(fd=segment_fd), doorbell_fd, "r")
    for group in range(first, first + count):
        writer.put([(group, 0, 0, 1)], [row(group)], epoch=0, attempt=0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def put_and_die(segment_fd: int, doorbell_fd: int, moment: str) -> None:
    """Put group 0, then die in the middle of putting group 1."""
    writer = RingWriter(MemorySegment(fd=segment_fd), doorbell_fd, "r")
    writer.put([(0, 0, 0, 1)], [row(0)], epoch=0, attempt=0)

    def half_a_payload(record: object, columns: list[Column], payload: np.ndarray) -> None:
        payload[: len(payload) // 2] = 255
        die()

    def store(words: Words, index: int, value: int) -> None:
        if index == {"before seq": ring_module.SEQ_WORD, "before head": ring_module.HEAD_WORD}.get(moment):
            die()
        stored(words, index, value)

    stored = Words.store
    if moment == "payload":
        ring_module.write_payload = half_a_payload  # type: ignore[assignment]
    elif moment == "before doorbell":
        ring_module.ring_doorbell = lambda fd: die()
    else:
        Words.store = store  # type: ignore[method-assign, assignment]
    writer.put([(1, 0, 0, 1)], [row(1)], epoch=0, attempt=0)
    raise AssertionError("the put must not return")


def copy_records(segment_fd: int, refs: list[tuple[int, int]]) -> None:
    view = RingView(MemorySegment(fd=segment_fd), "r")
    for pos, seq in refs:
        record = view.read(pos, seq)
        sys.stdout.buffer.write(record.column("tokens", 0).tobytes())
        assert record.valid()


@pytest.fixture
def doorbell() -> Iterator[int]:
    fd = new_doorbell()
    yield fd
    os.close(fd)


def groups_seen(tail: RingTail, view: RingView) -> list[int]:
    """Groups that became visible, after comparing every row with what its producer meant to put."""
    seen = []
    for ref, descriptor in tail.poll():
        [[group, *_]] = descriptor.spans
        assert np.array_equal(view.read(ref.pos, ref.seq).column("tokens", 0), row(group).arrays[0])
        seen.append(group)
    return seen


@pytest.mark.parametrize("moment", ["payload", "before seq", "before head"])
def test_a_producer_killed_inside_a_put_leaves_nothing_and_its_successor_goes_on(moment: str, doorbell: int) -> None:
    segment = MemorySegment(ring_bytes(CAPACITY))
    tail, view = RingTail(segment, "r"), RingView(segment, "r")
    child = start_child(f"{HERE}:put_and_die", segment.fd, doorbell, moment, fds=[segment.fd, doorbell])
    assert child.communicate()[0] == b"" and child.returncode == -signal.SIGKILL
    assert groups_seen(tail, view) == [0]
    head = tail.head
    assert any(segment.view()[ring_module.CONTROL_BYTES + head :])  # the half of it lies there, and nobody sees it

    put_groups(segment.fd, doorbell, 7, 2)
    assert groups_seen(tail, view) == [7, 8]
    assert tail.tail == 0 and view.read(head, 2 if moment != "before head" else 3).descriptor.spans == [[7, 0, 0, 1]]


def test_a_producer_killed_before_its_doorbell_has_put_the_record(doorbell: int) -> None:
    segment = MemorySegment(ring_bytes(CAPACITY))
    tail, view = RingTail(segment, "r"), RingView(segment, "r")
    child = start_child(f"{HERE}:put_and_die", segment.fd, doorbell, "before doorbell", fds=[segment.fd, doorbell])
    assert child.communicate()[0] == b"" and child.returncode == -signal.SIGKILL
    assert drain(doorbell) == 1
    assert groups_seen(tail, view) == [0, 1]


def test_producers_killed_at_any_moment_leave_only_whole_records(doorbell: int) -> None:
    segment = MemorySegment(ring_bytes(CAPACITY))
    tail, view = RingTail(segment, "r"), RingView(segment, "r")
    poller = select.poll()
    poller.register(doorbell, select.POLLIN)
    expected = 0
    for life in range(4):
        # The ring is full long before the child is done: it lives off what is released here, and dies in a put.
        child = start_child(f"{HERE}:put_forever", segment.fd, doorbell, expected, fds=[segment.fd, doorbell])
        for _ in range(10 + 7 * life):
            assert poller.poll(120_000), "a wake-up was lost"
            drain(doorbell)
            for group in groups_seen(tail, view):
                assert group == expected
                expected += 1
            tail.release(tail.cursor)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        for group in groups_seen(tail, view):
            assert group == expected
            expected += 1
        tail.release(tail.cursor)
        assert tail.head == tail.tail
    assert expected >= sum(10 + 7 * life for life in range(4))  # each wake-up brought a record at least


def put_forever(segment_fd: int, doorbell_fd: int, first: int) -> None:
    writer = RingWriter(MemorySegment(fd=segment_fd), doorbell_fd, "r")
    group = first
    while True:
        if writer.head - writer.tail < CAPACITY // 16:
            writer.put([(group, 0, 0, 1)], [row(group)], epoch=0, attempt=0)
            group += 1


def test_records_cross_processes_in_order_and_every_wake_up_arrives(doorbell: int) -> None:
    segment = MemorySegment(ring_bytes(8 * CAPACITY))
    tail, view = RingTail(segment, "r"), RingView(segment, "r")
    count = 3000
    child = start_child(f"{HERE}:put_groups", segment.fd, doorbell, 0, count, fds=[segment.fd, doorbell])
    poller = select.poll()
    poller.register(doorbell, select.POLLIN)
    seen: list[int] = []
    while len(seen) < count:
        assert poller.poll(120_000), "a wake-up was lost"
        drain(doorbell)
        seen += groups_seen(tail, view)
    assert seen == list(range(count))
    child.communicate()
    assert child.returncode == 0


def test_another_process_reads_the_same_bytes_from_its_own_read_only_map(doorbell: int) -> None:
    segment = MemorySegment(ring_bytes(CAPACITY))
    put_groups(segment.fd, doorbell, 3, 4)
    refs = [(ref.pos, ref.seq) for ref, _ in RingTail(segment, "r").poll()]
    child = start_child(f"{HERE}:copy_records", segment.fd, refs, fds=[segment.fd])
    found, _ = child.communicate()
    assert child.returncode == 0
    assert found == b"".join(row(group).arrays[0].tobytes() for group in range(3, 7))


def test_a_ring_outlives_its_producer(doorbell: int) -> None:
    segment = MemorySegment(ring_bytes(CAPACITY))
    child = start_child(f"{HERE}:put_groups", segment.fd, doorbell, 0, 5, fds=[segment.fd, doorbell])
    child.communicate()
    assert groups_seen(RingTail(segment, "r"), RingView(segment, "r")) == [0, 1, 2, 3, 4]
