from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rondo.comm.weights import slab as slab_module
from rondo.comm.weights.manifest import Manifest
from rondo.comm.weights.slab import SlotWriter, WeightSlab, slab_bytes
from rondo.runtime.errors import Closed, CorruptData, OutOfSpace
from tests.comm.memory import MemorySegment, start_child

HERE = "tests.comm.weights.test_slab"


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "model.embed_tokens.weight": torch.randn(37, 16, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.randn(16, generator=generator),
        "model.layers.0.mlp.experts.3.up_proj.weight": torch.randn(24, 16, generator=generator).to(torch.bfloat16).T,
        "rotary.inv_freq": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 16),
    }


def make(num_slots: int = 2) -> tuple[MemorySegment, WeightSlab]:
    total = sum(tensor.nbytes for tensor in weights(0).values())
    segment = MemorySegment(slab_bytes(total, len(weights(0)), num_slots))
    return segment, WeightSlab(segment, num_slots)


def publish(slab: WeightSlab, slot: int, version: int, attempt: int = 0, bucket_bytes: int = 256) -> int:
    writer = slab.write(slot, attempt=attempt, version=version, bucket_bytes=bucket_bytes)
    for name, tensor in weights(version).items():
        writer.add(name, tensor)
    return writer.finish()


def assert_holds(found: dict[str, torch.Tensor], version: int) -> None:
    wanted = weights(version)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_every_slot_holds_its_own_version() -> None:
    segment, slab = make(3)
    checksums = [publish(slab, slot, version=slot + 5) for slot in range(3)]
    reader = WeightSlab(segment, 3, readonly=True)
    for slot, checksum in enumerate(checksums):
        assert_holds(reader.read(slot, attempt=0, version=slot + 5, checksum=checksum), slot + 5)


def test_tensors_are_views_of_the_slab_at_cache_line_boundaries() -> None:
    segment, slab = make()
    checksum = publish(slab, 1, version=1)
    found = slab.read(1, attempt=0, version=1, checksum=checksum)
    start = np.frombuffer(segment.view(), np.uint8).ctypes.data
    for tensor in found.values():
        if tensor.numel():
            assert start <= tensor.data_ptr() < start + segment.num_bytes
            assert (tensor.data_ptr() - start) % 64 == 0


def test_equal_weights_have_equal_checksums_in_any_slot_version_or_attempt() -> None:
    _, slab = make()
    first = publish(slab, 0, version=1)
    publish(slab, 1, version=9)  # leaves other bytes behind
    writer = slab.write(1, attempt=3, version=2, bucket_bytes=256)
    for name, tensor in weights(1).items():
        writer.add(name, tensor)
    assert writer.finish() == first
    assert publish(slab, 1, version=2) != first
    assert 0 <= first < 2**64


def test_one_flipped_bit_anywhere_in_tensors_or_manifest_is_refused() -> None:
    segment, slab = make(1)
    checksum = publish(slab, 0, version=1)
    view = segment.view()
    start = segment.num_bytes - slab.capacity_bytes
    used = max(i for i, byte in enumerate(bytes(view[start:])) if byte) + 1
    num_refused = 0
    for at in range(start, start + used):
        view[at] ^= 1 << (at % 8)
        try:
            slab.read(0, attempt=0, version=1, checksum=checksum)
        except CorruptData:
            num_refused += 1
        view[at] ^= 1 << (at % 8)
    # Bytes between the last tensor and the manifest belong to nothing.
    assert used - num_refused < 64
    assert_holds(slab.read(0, attempt=0, version=1, checksum=checksum), 1)


def test_a_damaged_bucket_is_named_with_its_tensors() -> None:
    segment, slab = make()
    checksum = publish(slab, 1, version=1)
    start = segment.num_bytes - slab.capacity_bytes
    segment.view()[start + 37 * 16 * 2 + 40] ^= 1  # past the embedding: the norm
    with pytest.raises(CorruptData) as error:
        slab.read(1, attempt=0, version=1, checksum=checksum)
    text = "bytes 1024 to 1280 (model.embed_tokens.weight, model.norm.weight) must have checksum "
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"version": 2}, "weight slot 0 must hold version 2, got 1."),
        ({"attempt": 1}, "weight slot 0 must hold attempt 1, got 0."),
        ({"checksum": 5}, "weight slot 0 must hold checksum 5, got "),
    ],
)
def test_a_slot_that_holds_something_else_is_refused(wrong: dict[str, int], text: str) -> None:
    _, slab = make()
    names = {"attempt": 0, "version": 1, "checksum": publish(slab, 0, version=1)}
    with pytest.raises(CorruptData) as error:
        slab.read(0, **{**names, **wrong})
    assert str(error.value).startswith(text)


def test_a_slot_is_readable_only_between_finish_and_the_next_write() -> None:
    _, slab = make()
    names = {"attempt": 0, "version": 1, "checksum": 0}
    with pytest.raises(CorruptData, match="weight slot 0 must be complete, got empty"):
        slab.read(0, **names)
    writer = slab.write(0, attempt=0, version=1)
    writer.add("w", torch.ones(3))
    with pytest.raises(CorruptData, match="weight slot 0 must be complete, got half-written"):
        slab.read(0, **names)
    names["checksum"] = writer.finish()
    assert slab.read(0, **names)["w"].tolist() == [1.0] * 3
    slab.write(0, attempt=0, version=1)
    with pytest.raises(CorruptData, match="got half-written"):
        slab.read(0, **names)


def test_a_finished_slot_takes_no_more() -> None:
    _, slab = make()
    writer = slab.write(0, attempt=0, version=1)
    writer.finish()
    with pytest.raises(Closed):
        writer.add("w", torch.ones(3))
    with pytest.raises(Closed):
        writer.finish()


def publish_and_die(segment_fd: int, num_slots: int) -> None:
    slab = WeightSlab(MemorySegment(fd=segment_fd), num_slots)
    publish(slab, 0, version=1)
    writer = slab.write(1, attempt=0, version=2)
    writer.add("model.norm.weight", torch.ones(16))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_publisher_killed_in_a_slot_leaves_the_other_one_served() -> None:
    segment, slab = make()
    child = start_child(f"{HERE}:publish_and_die", segment.fd, 2, fds=[segment.fd])
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(CorruptData, match="weight slot 1 must be complete, got half-written"):
        slab.read(1, attempt=0, version=2, checksum=0)
    _, other = make()
    assert_holds(slab.read(0, attempt=0, version=1, checksum=publish(other, 0, version=1)), 1)
    assert_holds(slab.read(1, attempt=0, version=3, checksum=publish(slab, 1, version=3)), 3)


def test_a_manifest_that_was_exchanged_with_its_checksum_word_is_still_refused() -> None:
    segment, slab = make()
    checksum = publish(slab, 0, version=1)
    words = np.frombuffer(segment.view(), np.uint64)
    assert int(words[3 * 8]) == checksum
    at, num_bytes = int(words[4 * 8]), int(words[5 * 8])
    start = segment.num_bytes - 2 * slab.capacity_bytes
    manifest = bytes(segment.view()[start + at : start + at + num_bytes])
    forged = manifest.replace(b'"model.norm.weight"', b'"model.warm.weight"')
    segment.view()[start + at : start + at + num_bytes] = forged
    words[3 * 8] = int.from_bytes(hashlib.blake2b(forged, digest_size=8).digest(), "little")
    with pytest.raises(CorruptData, match="must hold checksum"):
        slab.read(0, attempt=0, version=1, checksum=checksum)


def test_slab_bytes_are_enough_for_many_small_tensors_with_long_names() -> None:
    tensors = {f"{'x' * 200}.{i}": torch.ones(1) for i in range(300)}
    slab = WeightSlab(MemorySegment(slab_bytes(4 * 300, 300, 2)), 2)
    writer = slab.write(1, attempt=0, version=0)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert len(slab.read(1, attempt=0, version=0, checksum=writer.finish())) == 300


def test_weights_larger_than_a_slot_are_refused_and_stay_unreadable() -> None:
    _, slab = make()
    writer = slab.write(0, attempt=0, version=1)
    with pytest.raises(OutOfSpace, match="tensor w must end within"):
        writer.add("w", torch.ones(10**6))
    with pytest.raises(CorruptData, match="half-written"):
        slab.read(0, attempt=0, version=1, checksum=0)


def test_a_slot_that_is_not_there_is_refused() -> None:
    _, slab = make()
    for slot in (-1, 2):
        with pytest.raises(ValueError, match=f"a weight slot must be between 0 and 1, got {slot}"):
            slab.write(slot, attempt=0, version=0)


def test_a_segment_too_small_for_its_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="a slab of 3 slots must have at least 16384 bytes, got 8192"):
        WeightSlab(MemorySegment(8192), 3)


def test_a_slab_is_sized_for_buckets_as_small_as_the_settings_allow() -> None:
    weights = torch.zeros(8 << 20, dtype=torch.uint8)
    segment = MemorySegment(slab_bytes(weights.nbytes, 1, 1, 4096))
    writer = WeightSlab(segment, 1).write(0, attempt=0, version=0, bucket_bytes=4096)
    writer.add("weights", weights)
    assert writer.finish()


def slab_of(num_bytes: int) -> WeightSlab:
    return WeightSlab(MemorySegment(4096 + num_bytes), 1)


def test_written_tensors_come_back_as_views_in_order_whatever_they_are() -> None:
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4, dtype=torch.float16),
        "transposed": torch.arange(12).reshape(3, 4).T,
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "trained": torch.ones(4, requires_grad=True),
    }
    slab = slab_of(8192)
    writer = slab.write(0, attempt=0, version=1)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    back = slab.read(0, attempt=0, version=1, checksum=writer.finish())
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape and not back[name].requires_grad
        assert back[name].contiguous().view(-1).tolist() == tensor.contiguous().view(-1).tolist()


def test_a_slot_that_is_too_small_is_named_with_its_size_and_a_name_twice_is_refused() -> None:
    writer = slab_of(4096).write(0, attempt=0, version=1)
    writer.add("a", torch.zeros(1000))
    with pytest.raises(OutOfSpace, match="tensor b must end within 4096 bytes, got 4100"):
        writer.add("b", torch.zeros(17))
    with pytest.raises(ValueError, match="tensors of one block must have different names, got a twice"):
        writer.add("a", torch.zeros(1))
    writer.add("c", torch.zeros(1))
    with pytest.raises(OutOfSpace, match="the manifest of 2 tensors must end within 4096 bytes"):
        writer.finish()


@pytest.mark.parametrize(
    "fields", [["float32", [4], 8190], ["float32", [4], 4], ["float32", [-4], 0], ["nn", [4], 0], ["float99", [4], 0]]
)
def test_a_manifest_that_points_out_of_its_block_is_refused(fields: list[object]) -> None:
    slab = slab_of(8192)
    checksum = publish(slab, 0, version=1)
    _, manifest = slab.contents(0, attempt=0, version=1, checksum=checksum)
    with pytest.raises(CorruptData):
        dataclasses.replace(manifest, tensors={"w": fields}).views(memoryview(bytes(8192)))


# ---- ahead ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes while somebody waits, and at no other moment."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(slab_module, "time", clock)


def half_written(slab: WeightSlab, num_whole: int) -> SlotWriter:
    """A writer of version 7 in slot 1, all of whose tensors are there and so many of whose buckets are told of."""
    writer = slab.write(1, attempt=0, version=7, bucket_bytes=256)
    for name, tensor in weights(7).items():
        writer.add(name, tensor)
    writer.whole(256 * num_whole)
    return writer


def manifest_of_7(slab: WeightSlab) -> Manifest:
    return slab.contents(0, attempt=0, version=7, checksum=publish(slab, 0, version=7))[1]


def test_what_is_whole_of_a_version_is_summed_while_the_rest_is_written_and_not_again() -> None:
    segment, slab = make()
    wanted = manifest_of_7(slab)
    publish(slab, 1, version=5)
    writer, reader = half_written(slab, 3), WeightSlab(segment, 2, readonly=True)
    assert reader.read_ahead(1, attempt=0, version=7, patience_s=0.01).sums == list(wanted.sums[:3])
    writer.whole(wanted.num_bytes)
    checksum = writer.finish()
    ahead = reader.read_ahead(1, attempt=0, version=7, patience_s=60.0)  # it is complete: nothing is waited for
    assert ahead.sums == list(wanted.sums)
    assert reader.read_ahead(1, attempt=0, version=7, patience_s=60.0, num_threads=3) == ahead
    assert_holds(reader.read(1, attempt=0, version=7, checksum=checksum, ahead=ahead), 7)
    writer.block[300] ^= 1  # nobody does while it is held: so what was read early needs no second look
    assert reader.read(1, attempt=0, version=7, checksum=checksum, ahead=ahead)
    with pytest.raises(CorruptData, match="bytes 256 to 512"):
        reader.read(1, attempt=0, version=7, checksum=checksum)


def test_what_was_read_before_the_slot_was_begun_again_or_was_read_wrong_or_elsewhere_is_read_again() -> None:
    _, slab = make()
    half_written(slab, 3)
    stale = slab.read_ahead(1, attempt=0, version=7, patience_s=0.01)
    writer = half_written(slab, 3)  # a publisher that was started anew
    fresh = slab.read_ahead(1, attempt=0, version=7, patience_s=0.01)
    assert stale.sums == fresh.sums and stale.begun != fresh.begun
    checksum = writer.finish()
    writer.block[300] ^= 1
    for useless in (stale, fresh._replace(slot=0), fresh._replace(sums=[fresh.sums[0], 5])):
        with pytest.raises(CorruptData, match="bytes 256 to 512"):
            slab.read(1, attempt=0, version=7, checksum=checksum, ahead=useless)


def test_reading_ahead_ends_when_nothing_comes_or_another_version_takes_the_slot() -> None:
    _, slab = make()
    assert slab.read_ahead(0, attempt=0, version=1, patience_s=0.01).sums == []
    half_written(slab, 1)
    slab.write(1, attempt=0, version=8)
    assert slab.read_ahead(1, attempt=0, version=7, patience_s=0.01).sums == []
