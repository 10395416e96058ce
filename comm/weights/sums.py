"""The checksum of a bucket: column sums, which cost a fraction of a copy where a CRC costs four copies.

Owns what is summed and how fast. Does not own where buckets lie (`tensors.py`) nor what happens when a sum is wrong.

A bucket is read as rows of 1017 little-endian words of 64 bits, 64 rows a piece. Summed modulo 2**64 are every column, over the
whole bucket, and every piece. The CRC-32 over these sums, and over the bytes behind the last whole row, is the checksum.

    w00 w01 ... w0,1016 |            damage within 8136 bytes (a flipped bit, a page of old bytes, zeros) changes no column
    w10 w11 ... w1,1016 | piece 0    twice: some sum is another one, for certain, and the CRC misses one in 2**32
    ...                 |            a shift, or pages that changed places, move words to other columns: a row has
    --------------------+            the length of no page, line or power of two
    c0  c1  ...  c1016               not seen: changes that cancel at exactly a multiple of 8136 bytes inside one piece

Invariant: equal bytes have equal checksums on every machine. A bucket without a whole row is its plain CRC-32.

    bucket_sum(memoryview(b"..."))          # 0 <= checksum < 2**32
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_ROW_WORDS = 1017
_ROW_BYTES = 8 * _ROW_WORDS
_PIECE_ROWS = 64
_FILLED_PIECES = 4
"""How many pieces are copied at once: two megabytes, which a copy writes around the cache, and whose source is still in it."""

Fill = Callable[[int, int], np.ndarray]
"""(start, end) -> these bytes, warm: copies them into the bucket, and says where they can be read without waiting for memory."""


def bucket_sum(bucket: memoryview | np.ndarray, fill: Fill | None = None) -> int:
    """The checksum of a contiguous bucket of bytes. The interpreter lock is free while it sums.

    `fill` is called for all bytes, from the first to the last, before they are read.
    """
    data = np.frombuffer(bucket, np.uint8)
    num_rows = data.size // _ROW_BYTES
    crc = 0
    if num_rows:
        words = data[: num_rows * _ROW_BYTES].view("<u8").reshape(num_rows, _ROW_WORDS)
        columns = np.empty((-(-num_rows // _PIECE_ROWS), _ROW_WORDS), "<u8")
        # Nothing to do between pieces, or between those that are filled together: one call sums all that are whole, and other
        # threads have the interpreter lock.
        step = _FILLED_PIECES if fill is not None else len(columns)
        for first in range(0, len(columns), step):
            start, end = first * _PIECE_ROWS, min((first + step) * _PIECE_ROWS, num_rows)
            warm = words[start:end]
            if fill is not None:
                warm = fill(start * _ROW_BYTES, end * _ROW_BYTES).view("<u8").reshape(end - start, _ROW_WORDS)
            num_whole = (end - start) // _PIECE_ROWS
            whole = warm[: num_whole * _PIECE_ROWS].reshape(num_whole, _PIECE_ROWS, _ROW_WORDS)
            np.add.reduce(whole, axis=1, out=columns[first : first + num_whole])
            if num_whole * _PIECE_ROWS < end - start:
                np.add.reduce(warm[num_whole * _PIECE_ROWS :], axis=0, out=columns[first + num_whole])
        crc = zlib.crc32(columns.sum(axis=0).data, zlib.crc32(columns.sum(axis=1).data))
    if fill is not None:
        fill(num_rows * _ROW_BYTES, data.size)
    return zlib.crc32(data[num_rows * _ROW_BYTES :].data, crc)


def in_threads(work: Callable[..., T], arguments: Iterable[tuple[object, ...]], num_threads: int) -> list[T]:
    """`work` on every tuple of arguments, in order; on `num_threads` threads where that is more than one."""
    if num_threads < 2:
        return list(starmap(work, arguments))
    with ThreadPoolExecutor(num_threads, "weights") as pool:
        return [future.result() for future in [pool.submit(work, *each) for each in arguments]]
