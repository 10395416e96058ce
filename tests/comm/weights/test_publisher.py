from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rondo.comm.weights.delta import apply, encode
from rondo.comm.weights.held import Published
from rondo.comm.weights.publisher import Publisher
from rondo.comm.weights.slab import WeightSlab
from rondo.runtime.errors import Closed, CorruptData, OutOfSpace, PeerGone
from rondo.runtime.waits import pending
from tests.comm.memory import MemorySegment
from tests.comm.weights.versions import BUCKET_BYTES, assert_serves, holding, new_slab, publish, weights

DEADLINE_S = 120.0


class Gate:
    """A send that waits to be opened, on the publisher's thread, and remembers what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.given: list[tuple[int, int | None]] = []
        self._error = error

    def __call__(self, version: Published, before: Published | None) -> None:
        self.given.append((version.id.version, before.id.version if before else None))
        self.entered.set()
        assert self.open.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error


def copy(publisher: Publisher, slot: int, version: int) -> tuple[int, int]:
    """(slot, checksum) once the slot is complete."""
    copied = publisher.copy(slot, attempt=0, version=version, tensors=weights(version).items())
    return slot, copied.id.checksum


def test_a_published_version_is_the_one_a_plain_write_makes() -> None:
    slab, other = new_slab(), new_slab()
    publisher = Publisher(slab, bucket_bytes=BUCKET_BYTES)
    slot, checksum = copy(publisher, 1, 5)
    assert checksum == publish(other, 0, 5).id.checksum
    found = slab.read(slot, attempt=0, version=5, checksum=checksum, num_threads=2)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(5).items())
    publisher.close()


def test_weights_may_change_as_soon_as_copy_returns() -> None:
    slab, wanted = new_slab(), publish(new_slab(), 0, 5).id.checksum
    tensors = weights(5)
    publisher = Publisher(slab, [gate := Gate()], bucket_bytes=BUCKET_BYTES)
    copied = publisher.copy(0, attempt=0, version=5, tensors=tensors.items())
    for tensor in tensors.values():
        tensor.zero_()  # the optimizer's next step
    assert copied.id.checksum == wanted
    assert gate.entered.wait(DEADLINE_S) and not copied.sent.done()  # readers of the slab do not wait for the rest
    gate.open.set()
    copied.sent.result(DEADLINE_S)
    publisher.close()


def test_sends_get_each_version_with_the_one_before_where_its_slot_still_holds_it() -> None:
    publisher = Publisher(new_slab(), [gate := Gate()], bucket_bytes=BUCKET_BYTES)
    gate.open.set()
    for slot, version in ((0, 1), (1, 2), (1, 3), (2, 4)):
        copy(publisher, slot, version)
    publisher.wait()
    assert gate.given == [(1, None), (2, 1), (3, None), (4, 3)]
    publisher.close()


def test_a_send_makes_deltas_of_what_the_slots_hold() -> None:
    slab, messages = new_slab(), []

    def send(version: Published, before: Published | None) -> None:
        if before is not None:
            messages.append(encode(before, version))

    publisher = Publisher(slab, [send], bucket_bytes=BUCKET_BYTES)
    held = holding(publish(new_slab(), 0, 1))
    for slot, version in ((0, 1), (1, 2), (2, 3)):
        copy(publisher, slot, version)
    publisher.wait()
    for message in messages:
        apply(held, message)
    assert_serves(held, 3)
    publisher.close()


def test_a_failed_send_is_in_its_future_and_stops_the_next_copy() -> None:
    slab = new_slab()
    publisher = Publisher(slab, [gate := Gate(PeerGone("rank 3 must answer, got nothing"))], bucket_bytes=BUCKET_BYTES)
    gate.open.set()
    copied = publisher.copy(0, attempt=0, version=5, tensors=weights(5).items())
    with pytest.raises(PeerGone, match="rank 3 must answer"):
        copied.sent.result(DEADLINE_S)
    assert slab.read(0, attempt=0, version=5, checksum=copied.id.checksum)  # the slab is complete all the same
    with pytest.raises(PeerGone, match="rank 3 must answer"):
        publisher.copy(1, attempt=0, version=6, tensors=weights(6).items())
    publisher.close()


def test_a_failure_while_weights_are_gathered_reaches_its_caller_and_leaves_the_slot_unserved() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(5).items())[:2]
        raise RuntimeError("the collective timed out")

    slab = new_slab()
    publisher = Publisher(slab, bucket_bytes=BUCKET_BYTES)
    with pytest.raises(RuntimeError, match="the collective timed out"):
        publisher.copy(0, attempt=0, version=5, tensors=broken())
    with pytest.raises(CorruptData, match="must be complete, got half-written"):
        slab.read(0, attempt=0, version=5, checksum=0)
    slot, checksum = copy(publisher, 0, 6)  # the next whole version repairs it
    assert slab.read(slot, attempt=0, version=6, checksum=checksum)
    publisher.close()
    assert not [wait for wait in pending() if wait.name == "publication"]


def test_weights_too_large_for_their_slot_are_told_and_never_complete() -> None:
    slab = new_slab()
    publisher = Publisher(slab, bucket_bytes=BUCKET_BYTES)
    too_much = [(f"w{i}", torch.ones(20_000)) for i in range(10)]
    with pytest.raises(OutOfSpace):
        publisher.copy(0, attempt=0, version=5, tensors=too_much)
    with pytest.raises(CorruptData, match="got half-written"):
        slab.read(0, attempt=0, version=5, checksum=0)
    publisher.close()


def test_a_manifest_too_large_for_its_slot_is_told_and_never_complete() -> None:
    slab = new_slab()
    publisher = Publisher(slab, bucket_bytes=BUCKET_BYTES)
    many = [(f"{'w' * 200}{i}", torch.ones(1)) for i in range(1000)]
    with pytest.raises(OutOfSpace, match="the manifest of 1000 tensors"):
        publisher.copy(0, attempt=0, version=5, tensors=many)
    with pytest.raises(CorruptData, match="got half-written"):
        slab.read(0, attempt=0, version=5, checksum=0)
    publisher.close()


def test_a_second_publication_waits_for_the_first_and_a_closed_publisher_takes_none() -> None:
    slab = new_slab()
    publisher = Publisher(slab, [gate := Gate()], bucket_bytes=BUCKET_BYTES)
    publisher.copy(0, attempt=0, version=5, tensors=weights(5).items())
    assert gate.entered.wait(DEADLINE_S)
    with pytest.raises(TimeoutError):
        publisher.copy(1, attempt=0, version=6, tensors=weights(6).items(), deadline_s=0)
    gate.open.set()
    publisher.close()
    with pytest.raises(Closed, match="must be open"):
        publisher.copy(1, attempt=0, version=6, tensors=weights(6).items())


def test_a_closed_publisher_leaves_no_thread_and_lets_go_of_the_slab() -> None:
    before = set(threading.enumerate())
    slab: WeightSlab = new_slab()
    publisher = Publisher(slab, [gate := Gate()], bucket_bytes=BUCKET_BYTES)
    gate.open.set()
    copy(publisher, 0, 5)
    publisher.close()
    assert set(threading.enumerate()) <= before  # others may end meanwhile
    gc.collect()
    slab.close()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_any_number_of_threads_makes_the_same_version(num_threads: int) -> None:
    slab, wanted = new_slab(), publish(new_slab(), 0, 5)
    np.frombuffer(slab.write(1, attempt=0, version=0).block, np.uint8)[:] = 7  # what was there before
    publisher = Publisher(slab, bucket_bytes=BUCKET_BYTES, num_threads=num_threads)
    tensors = weights(5)
    copied = publisher.copy(1, attempt=0, version=5, tensors=tensors.items())
    for tensor in tensors.values():
        tensor.zero_()
    assert copied.id.checksum == wanted.id.checksum
    held = holding(Published.in_slab(slab, 1, wanted.id))
    assert_serves(held, 5)
    publisher.close()


def test_several_threads_copy_tensors_that_are_no_plain_memory() -> None:
    strange = {
        "transposed": torch.arange(12_000).reshape(100, 120).T, "strided": torch.arange(90_000)[::3], "scalar": torch.tensor(7),
        "trained": torch.ones(5, requires_grad=True), "none": torch.empty(0, 4), "eight": torch.ones(9).to(torch.float8_e4m3fn),
    }  # fmt: skip
    slab = WeightSlab(MemorySegment(1 << 20), 1)
    publisher = Publisher(slab, bucket_bytes=BUCKET_BYTES, num_threads=3)
    checksum = publisher.copy(0, attempt=0, version=1, tensors=strange.items()).id.checksum
    found = slab.read(0, attempt=0, version=1, checksum=checksum)
    for name, tensor in strange.items():
        assert found[name].shape == tensor.shape and found[name].tolist() == tensor.tolist()
    publisher.close()


def test_a_failure_while_several_threads_copy_reaches_its_caller_when_all_have_stopped() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(5).items())[:3]
        raise RuntimeError("the collective timed out")

    before = set(threading.enumerate())
    publisher = Publisher(new_slab(), bucket_bytes=BUCKET_BYTES, num_threads=2)
    with pytest.raises(RuntimeError, match="the collective timed out"):
        publisher.copy(0, attempt=0, version=5, tensors=broken())
    publisher.close()
    assert set(threading.enumerate()) <= before  # others may end meanwhile
