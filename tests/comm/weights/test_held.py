from __future__ import annotations

import pytest
import torch

from rondo.comm.weights.held import Held, VersionId
from rondo.runtime.errors import Closed, CorruptData, OutOfSpace
from tests.comm.weights.versions import BUCKET_BYTES, assert_serves, fill, flip, holding, new_slab, publish


def test_a_version_is_served_only_once_it_is_proved() -> None:
    published = publish(new_slab(), 0, 5)
    held = Held(published.manifest.num_bytes)
    for serve in (held.tensors, held.published):
        with pytest.raises(Closed):
            serve()
    fill(held, published)
    assert held.id is None
    with pytest.raises(Closed, match="must be proved before it is served"):
        held.tensors()
    held.prove()
    assert held.id == published.id
    assert_serves(held, 5)


def test_one_wrong_bit_in_any_bucket_keeps_a_version_from_being_served() -> None:
    published = publish(new_slab(), 0, 5)
    held = Held(published.manifest.num_bytes)
    for index in range(published.manifest.num_buckets):
        fill(held, published)
        flip(held.bucket(index), 77)
        with pytest.raises(
            CorruptData, match=f"got 1 of {published.manifest.num_buckets} that have not .first {index}"
        ):
            held.prove()
        assert held.id is None
        flip(held.bucket(index), 77)  # repaired: only this bucket is summed again
        held.prove()
        assert_serves(held, 5)


def test_a_proved_version_cannot_be_written() -> None:
    held = holding(publish(new_slab(), 0, 5))
    for write in (lambda: held.bucket(0), held.prove):
        with pytest.raises(Closed, match="must stay as it is"):
            write()


def test_what_is_too_large_or_damaged_is_refused_before_anything_changes() -> None:
    slab = new_slab()
    held = Held(publish(slab, 0, 5).manifest.num_bytes)
    fill(held, published := publish(slab, 0, 5))
    held.prove()
    small = Held(published.manifest.num_bytes - 1)
    with pytest.raises(OutOfSpace, match="must fit into"):
        small.begin(published.id, published.manifest.raw)
    other = publish(slab, 1, 6)
    with pytest.raises(CorruptData, match="a manifest must have checksum"):
        held.begin(other.id, published.manifest.raw)
    assert_serves(held, 5)


def test_a_held_version_can_be_larger_memory_than_the_version() -> None:
    held = holding(publish(new_slab(), 0, 5))
    assert held.published().data.size == held.manifest.num_bytes < held.capacity_bytes
    assert held.manifest.bucket_bytes == BUCKET_BYTES
    assert held.manifest.bounds(held.manifest.num_buckets - 1)[1] == held.manifest.num_bytes


@pytest.mark.parametrize("fields", [None, [1, 2], [1, 2, -3], [1, 2, "3"], [True, 2, 3]])
def test_a_version_that_is_named_wrongly_is_refused(fields: object) -> None:
    with pytest.raises(CorruptData, match="a version's name must be"):
        VersionId.from_json(fields)


def test_layouts_are_equal_only_with_equal_tensors_places_and_buckets() -> None:
    slab = new_slab()
    first, second = publish(slab, 0, 5).manifest, publish(slab, 1, 6).manifest
    assert first.same_layout(second)
    writer = slab.write(1, attempt=0, version=6, bucket_bytes=BUCKET_BYTES)
    writer.add("model.norm.weight", torch.ones(3))
    checksum = writer.finish()
    assert not first.same_layout(slab.contents(1, attempt=0, version=6, checksum=checksum)[1])
