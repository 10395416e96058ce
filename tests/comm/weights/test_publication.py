from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from rondo.comm.weights import publication
from rondo.comm.weights.held import Published
from rondo.comm.weights.slab import WeightSlab
from rondo.runtime.errors import CorruptData, OutOfSpace
from tests.comm.memory import MemorySegment
from tests.comm.weights.versions import BUCKET_BYTES, assert_serves, holding, new_slab, publish, weights

Tensors = Iterable[tuple[str, torch.Tensor]]


def copied(slab: WeightSlab, slot: int, tensors: Tensors, version: int = 5, num_threads: int = 2) -> int:
    """The checksum of what lies in the slot."""
    how = {"bucket_bytes": BUCKET_BYTES, "num_threads": num_threads}
    return publication.publish(slab, slot, attempt=0, version=version, tensors=tensors, **how).checksum


def test_a_published_version_is_the_one_a_plain_write_makes() -> None:
    slab, other = new_slab(), new_slab()
    checksum = copied(slab, 1, weights(5).items())
    assert checksum == publish(other, 0, 5).id.checksum
    found = slab.read(1, attempt=0, version=5, checksum=checksum, num_threads=2)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(5).items())


def test_a_failure_while_weights_are_gathered_reaches_its_caller_and_leaves_the_slot_unserved() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(5).items())[:2]
        raise RuntimeError("the collective timed out")

    slab = new_slab()
    with pytest.raises(RuntimeError, match="the collective timed out"):
        copied(slab, 0, broken())
    with pytest.raises(CorruptData, match="must be complete, got half-written"):
        slab.read(0, attempt=0, version=5, checksum=0)
    checksum = copied(slab, 0, weights(6).items(), version=6)  # the next whole version repairs it
    assert slab.read(0, attempt=0, version=6, checksum=checksum)


def test_weights_too_large_for_their_slot_are_told_and_never_complete() -> None:
    slab = new_slab()
    too_much = [(f"w{i}", torch.ones(20_000)) for i in range(10)]
    with pytest.raises(OutOfSpace):
        copied(slab, 0, too_much)
    with pytest.raises(CorruptData, match="got half-written"):
        slab.read(0, attempt=0, version=5, checksum=0)


def test_a_manifest_too_large_for_its_slot_is_told_and_never_complete() -> None:
    slab = new_slab()
    many = [(f"{'w' * 200}{i}", torch.ones(1)) for i in range(1000)]
    with pytest.raises(OutOfSpace, match="the manifest of 1000 tensors"):
        copied(slab, 0, many)
    with pytest.raises(CorruptData, match="got half-written"):
        slab.read(0, attempt=0, version=5, checksum=0)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_any_number_of_threads_makes_the_same_version(num_threads: int) -> None:
    slab, wanted = new_slab(), publish(new_slab(), 0, 5)
    np.frombuffer(slab.write(1, attempt=0, version=0).block, np.uint8)[:] = 7  # what was there before
    tensors = weights(5)
    checksum = copied(slab, 1, tensors.items(), num_threads=num_threads)
    for tensor in tensors.values():
        tensor.zero_()
    assert checksum == wanted.id.checksum
    held = holding(Published.in_slab(slab, 1, wanted.id))
    assert_serves(held, 5)


def test_several_threads_copy_tensors_that_are_no_plain_memory() -> None:
    strange = {
        "transposed": torch.arange(12_000).reshape(100, 120).T, "strided": torch.arange(90_000)[::3], "scalar": torch.tensor(7),
        "trained": torch.ones(5, requires_grad=True), "none": torch.empty(0, 4), "eight": torch.ones(9).to(torch.float8_e4m3fn),
    }  # fmt: skip
    slab = WeightSlab(MemorySegment(1 << 20), 1)
    checksum = copied(slab, 0, strange.items(), num_threads=3)
    found = slab.read(0, attempt=0, version=5, checksum=checksum)
    for name, tensor in strange.items():
        assert found[name].shape == tensor.shape and found[name].tolist() == tensor.tolist()


def test_a_failure_while_several_threads_copy_reaches_its_caller_when_all_have_stopped() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(5).items())[:3]
        raise RuntimeError("the collective timed out")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the collective timed out"):
        copied(new_slab(), 0, broken())
    assert set(threading.enumerate()) <= before  # others may end meanwhile
