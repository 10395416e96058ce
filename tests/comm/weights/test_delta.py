from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.comm.weights.delta import apply, changed_words, encode
from rondo.comm.weights.held import Held, Published, VersionId
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.runtime.errors import Closed, CorruptData, Refused
from tests.comm.memory import MemorySegment
from tests.comm.weights.versions import assert_serves, fill, flip, holding, new_slab, publish


def pair(rate: float = 2e-5) -> tuple[Published, Published, bytes]:
    slab = new_slab()
    base, new = publish(slab, 0, 4, rate), publish(slab, 1, 5, rate)
    message = encode(base, new)
    assert message is not None
    return base, new, message


def of_words(*versions: np.ndarray, bucket_bytes: int = 4096) -> list[Published]:
    """A version an array of 16-bit words."""
    slab = WeightSlab(MemorySegment(slab_bytes(versions[0].nbytes, 1, len(versions)) + 65536), len(versions))
    made = []
    for slot, words in enumerate(versions):
        writer = slab.write(slot, attempt=0, version=slot, bucket_bytes=bucket_bytes)
        writer.add("w", torch.from_numpy(words.view(np.int16)).view(torch.bfloat16))
        made.append(Published.in_slab(slab, slot, VersionId(0, slot, writer.finish())))
    return made


@pytest.mark.parametrize("rate", [1e-7, 2e-6, 2e-5, 2e-4])
def test_a_delta_makes_exactly_the_next_version(rate: float) -> None:
    base, new, message = pair(rate)
    held = holding(base)
    assert apply(held, message) == new.id == held.id
    assert_serves(held, 5, rate)
    assert len(message) < new.manifest.num_bytes


def test_a_small_step_costs_a_small_share_of_the_bytes() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**16, 1 << 20).astype(np.uint16)
    moved = words.copy()
    moved[rng.random(words.size) < 0.02] += 1
    base, new = of_words(words, moved, bucket_bytes=1 << 20)
    message = encode(base, new)
    assert message is not None and len(message) < 0.015 * words.nbytes
    held = holding(base)
    apply(held, message)
    assert np.array_equal(np.asarray(held.published().data[: words.nbytes].view(np.uint16)), moved)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6000), st.floats(0, 1), st.sampled_from([1, 3, 127, 128, 32767]), st.integers(0, 2**32))
def test_any_change_of_any_words_comes_back_bit_by_bit(num_words: int, share: float, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**16, num_words).astype(np.uint16)
    moved = words.copy()
    at = rng.random(num_words) < share
    moved[at] += rng.integers(-most, most + 1, num_words)[at].astype(np.uint16)
    base, new = of_words(words, moved)
    message = encode(base, new)
    if message is not None:
        held = holding(base)
        apply(held, message)
        assert np.array_equal(held.published().data, new.data)


def test_gaps_of_any_length_are_coded() -> None:
    words = np.zeros(2048, np.uint16)
    for at in ([0], [2047], [254, 255, 256], [255, 511, 1021], [0, 256, 766, 2047]):
        moved = words.copy()
        moved[at] = [1, 0xFFFF, 700, 3][: len(at)]
        base, new = of_words(words, moved)
        message = encode(base, new)
        assert message is not None
        held = holding(base)
        apply(held, message)
        assert np.array_equal(held.published().data, new.data)


def test_words_that_differ_are_found_at_every_place_and_size() -> None:
    for num_bytes in (0, 1, 2, 15, 4096, (1 << 20) + 6):
        old = np.zeros(num_bytes, np.uint8)
        for at in {0, num_bytes // 4, num_bytes // 2 - 1} if num_bytes > 1 else ():
            new = old.copy()
            new[2 * at + 1] = 1
            assert changed_words(old, new).tolist() == [at]
        assert changed_words(old, old).size == 0


def test_a_wrong_base_is_refused_and_what_was_held_stays_served() -> None:
    _, new, message = pair()
    slab = new_slab()
    for other in (publish(slab, 0, 3), publish(slab, 1, 4, attempt=1), publish(slab, 2, 4, rate=3e-5)):
        held = holding(other)
        with pytest.raises(Refused, match="must find its base"):
            apply(held, message)
        assert held.id == other.id
        fill(held, new)  # the whole version repairs it
        held.prove()
        assert_serves(held, 5)


def test_a_receiver_that_holds_nothing_is_refused() -> None:
    base, _, message = pair()
    with pytest.raises(Refused, match=r"must find its base .* got none"):
        apply(Held(base.manifest.num_bytes), message)


def test_a_message_cut_off_anywhere_is_refused() -> None:
    base, _, message = pair()
    held = holding(base)
    for length in [*range(0, 64), *range(64, len(message), 211), len(message) - 1]:
        with pytest.raises(CorruptData):
            apply(held, message[:length])
    assert_serves(held, 4)


def test_a_flipped_bit_anywhere_in_a_message_is_refused() -> None:
    base, _, message = pair()
    held = holding(base)
    for bit in [*range(0, 200), *range(200, len(message) * 8, 997)]:
        damaged = np.frombuffer(bytearray(message), np.uint8)
        flip(damaged, bit)
        with pytest.raises(CorruptData):
            apply(held, damaged)
    assert_serves(held, 4)
    apply(held, message)
    assert_serves(held, 5)


def test_a_bit_flipped_in_the_base_is_found_by_the_sums_and_never_served() -> None:
    base, new, message = pair(1e-7)
    held = holding(base)
    flip(held.published().data, 12345)
    with pytest.raises(CorruptData, match="must have the sum its manifest names"):
        apply(held, message)
    assert held.id is None
    with pytest.raises(Closed, match="must be proved before it is served"):
        held.tensors()
    with pytest.raises(Refused):
        apply(held, message)
    fill(held, new)
    held.prove()
    assert_serves(held, 5, 1e-7)


def test_versions_of_other_layouts_have_no_delta() -> None:
    base, _, _ = pair()
    slab = WeightSlab(MemorySegment(1 << 20), 1)
    writer = slab.write(0, attempt=0, version=5)
    writer.add("model.norm.weight", torch.ones(64))
    assert encode(base, Published.in_slab(slab, 0, VersionId(0, 5, writer.finish()))) is None


def test_versions_that_share_nothing_have_no_delta() -> None:
    rng = np.random.default_rng(0)
    base, new = of_words(*(rng.integers(0, 2**16, 30_000).astype(np.uint16) for _ in range(2)))
    assert encode(base, new) is None
