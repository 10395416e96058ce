"""Partitions over the in-process bus: what several tests drive a whole partition with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.client import Partition

ROWS_A_PUT = 2


def key(number: int) -> str:
    return f"k{number}"


async def put(part: Partition, numbers: Sequence[int], length: int = 4) -> None:
    """Rows that say whose they are in every byte; a second put of a key changes nothing."""
    values = [np.full(length, number, np.int32) for number in numbers]
    await part.put({"x": values}, keys=[key(number) for number in numbers])


async def score(part: Partition, batch: Batch) -> None:
    await part.add(batch, {"score": [np.full(2, 10 * x[0], np.float32) for x in batch["x"]]})


def numbers_of(batch: Batch) -> list[int]:
    """The rows of a batch, each checked to be whole."""
    found = []
    for name, x in zip(batch.keys or (), batch["x"], strict=True):
        assert (x == x[0]).all() and name == key(int(x[0]))
        found.append(int(x[0]))
    if "score" in batch.columns:
        assert [float(s[1]) for s in batch["score"]] == [10.0 * number for number in found]
    return found


def leftovers(coordinator: Any) -> int:
    """Waiters of partitions."""
    return len(coordinator.wakes)
