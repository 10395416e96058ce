from __future__ import annotations

import zlib
from functools import partial

import numpy as np
import pytest

from rondo.comm.weights.sums import bucket_sum

ROW = 8 * 1017
PAGE = 4096


def bytes_of(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


@pytest.mark.parametrize("num_bytes", [0, 1, 7, ROW - 1, ROW, ROW + 3, 65 * ROW + 5, 200 * ROW])
def test_every_flipped_bit_changes_the_sum(num_bytes: int) -> None:
    data = bytes_of(num_bytes)
    whole = bucket_sum(data)
    places = (
        range(num_bytes * 8) if num_bytes < 64 else np.random.default_rng(1).integers(0, num_bytes * 8, 50).tolist()
    )
    for bit in [*places, *([0, num_bytes * 8 - 1] if num_bytes else [])]:
        data[bit // 8] ^= 1 << (bit % 8)
        assert bucket_sum(data) != whole
        data[bit // 8] ^= 1 << (bit % 8)
    assert bucket_sum(data) == whole


def test_two_flips_that_cancel_in_a_plain_sum_are_seen() -> None:
    for distance in (1, 2, 512, 1016, 1018, 1024, 64 * 1017):
        data = np.zeros(130 * ROW, np.uint8)
        words = data.view(np.uint64)
        words[5], words[5 + distance] = 1 << 40, 0
        before = bucket_sum(data)
        words[5], words[5 + distance] = 0, 1 << 40  # the same bit, once up and once down
        assert bucket_sum(data) != before


def test_pages_words_and_pieces_that_changed_places_are_seen() -> None:
    data = bytes_of(64 * ROW * 3)
    before = bucket_sum(data)
    for size, first, second in ((PAGE, 0, 1), (PAGE, 0, 2), (PAGE, 3, 90), (8, 4, 5), (64 * ROW, 0, 1)):
        moved = data.copy()
        a, b = slice(first * size, (first + 1) * size), slice(second * size, (second + 1) * size)
        moved[a], moved[b] = data[b], data[a]
        assert bucket_sum(moved) != before
    for shift in (1, 8, 64, PAGE):
        assert bucket_sum(np.roll(data, shift)) != before


def copy(data: np.ndarray, source: np.ndarray, seen: list[tuple[int, int]], start: int, end: int) -> np.ndarray:
    seen.append((start, end))
    data[start:end] = source[start:end]
    return (source if len(seen) % 2 else data)[start:end]


def test_bytes_are_filled_in_before_they_are_summed() -> None:
    for num_bytes in (0, 5, ROW, 64 * ROW, 150 * ROW + 77, 256 * ROW, 700 * ROW + 1):
        source, data = bytes_of(num_bytes), bytes_of(num_bytes, seed=3)
        filled: list[tuple[int, int]] = []
        assert bucket_sum(data, partial(copy, data, source, filled)) == bucket_sum(source)
        assert np.array_equal(data, source)
        assert [start for start, _ in filled] == [0, *[end for _, end in filled[:-1]]] and filled[-1][1] == num_bytes


def test_a_piece_that_is_stale_or_zero_is_seen() -> None:
    data = bytes_of(128 * ROW)
    before = bucket_sum(data)
    for start, length in ((0, 4096), (64 * ROW, 64 * ROW), (ROW - 64, 128)):
        for stale in (np.zeros(length, np.uint8), bytes_of(length, seed=7)):
            torn = data.copy()
            torn[start : start + length] = stale
            assert bucket_sum(torn) != before


def test_a_bucket_without_a_whole_row_is_its_crc() -> None:
    data = bytes_of(ROW - 1)
    assert bucket_sum(data) == zlib.crc32(data.tobytes())


def test_the_sum_does_not_depend_on_where_the_bucket_lies() -> None:
    data = bytes_of(3 * ROW + 11)
    moved = np.empty(data.size + 3, np.uint8)
    moved[3:] = data
    assert bucket_sum(moved[3:]) == bucket_sum(data) == bucket_sum(memoryview(data.tobytes()))
