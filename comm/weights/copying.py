"""Copying a version into a slot on several threads, each bucket summed while it is in the cache.

Owns which thread copies what. Does not own the slot (`slab.py`) nor when the version counts (`publication.py`).

    tensors    |  a   |      b            | c | d | ...
    buckets    |   0    |    1    |    2    |  ...            a bucket is one piece of work: copy two megabytes, sum them,
    threads        x         y         x                      copy the next; the calling thread works too

What lies in one tensor is summed there: the copy has just read it, and it is in the cache; what it wrote is not. Readers are told
of the buckets that are done, and sum them meanwhile.

Invariant: when `copy_and_sum` returns, every byte is copied and every bucket is summed; when it raises, no thread works any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from rondo.comm.weights.slab import SlotWriter
from rondo.comm.weights.sums import bucket_sum
from rondo.runtime.memory.to_host import host_bytes

_Part = tuple[int, np.ndarray]
"""Where in the block the bytes go, and the bytes."""


def copy_and_sum(
    writer: SlotWriter, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, num_threads: int
) -> list[int]:
    """Copy `tensors` (any dtype, device and strides) into `writer`'s block; the sums of all its buckets, for `finish`.

    Raises what `tensors` and `SlotWriter.add` raise.
    """
    block = writer.block
    sums: dict[int, Future[int]] = {}
    parts: deque[_Part] = deque()
    end = start = told = 0
    with ThreadPoolExecutor(max(1, num_threads - 1), "weights") as pool:
        helping: list[Future[int]] = []

        def bucket_done(until: int) -> None:
            nonlocal start, told
            work = _take(parts, until)
            helping[:] = [future for future in helping if not future.done()]
            if len(helping) < 2 * (num_threads - 1):  # one waits for each, so that none stands idle
                sums[start] = pool.submit(_copy_bucket, block[start:until], start, work)
                helping.append(sums[start])
            else:
                sums[start] = Future()
                sums[start].set_result(_copy_bucket(block[start:until], start, work))
            start = until
            while told < start and sums[told].done():
                told += min(bucket_bytes, start - told)
            writer.whole(told)

        for name, tensor in tensors:
            begins, ends = writer.place(name, tensor)
            parts += [
                part for part in ((end, np.zeros(begins - end, np.uint8)), (begins, host_bytes(tensor))) if part[1].size
            ]
            end = ends
            while end - start >= bucket_bytes:
                bucket_done(start + bucket_bytes)
        if end > start:
            bucket_done(end)
        wait(sums.values())
    writer.whole(end)
    return [sums[start].result() for start in sorted(sums)]


def _take(parts: deque[_Part], until: int) -> list[_Part]:
    """The parts below `until`, off the left; one that goes beyond is cut."""
    taken = []
    while parts and parts[0][0] < until:
        at, data = parts.popleft()
        room = until - at
        taken.append((at, data[:room]))
        if data.size > room:
            parts.appendleft((until, data[room:]))
            break
    return taken


def _copy_bucket(bucket: np.ndarray, first: int, parts: list[_Part]) -> int:
    left = deque(parts)

    def fill(start: int, end: int) -> np.ndarray:
        taken = _take(left, first + end)
        for at, data in taken:
            np.copyto(bucket[at - first : at - first + data.size], data)
        return taken[0][1] if len(taken) == 1 else bucket[start:end]

    return bucket_sum(bucket, fill)
