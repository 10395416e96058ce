"""Buckets: which tensors of a version travel together, where each lies in the bytes that do, and what every way of sending is.

Owns the layout that SGLang calls `flattened_bucket`: tensors as raw bytes, one behind the other, without gaps; and the blocks
that take turns: one is packed while the server loads the other. Does not own how a bucket travels (`weights_tensor.py`,
`weights_distributed.py`).

    pack 0 | pack 1     | pack 2     |
           | server: 0  | server: 1  | server: 2

    bucket_bytes 24:   | w float32 [4]   b bfloat16 [3] |   | v float32 [9], larger than a bucket: alone |
                       0                16            22    0                                          36

Invariant: every tensor of a version is in exactly one bucket, and starts at a multiple of its element size, which a server that
views the bytes demands: wide elements come first. No bucket but one of a single tensor is larger than asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rondo.runtime.errors import ConfigError

NUM_BLOCKS = 2


class Transfer:
    """One way for the bytes of versions. What a way has no use for does nothing."""

    in_session = True
    """Its updates lie between begin and end of a weight update."""

    async def open(self) -> None:
        """Prepare the way itself."""

    async def prepare(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """What can be done of a sending while the server still generates."""

    async def send(self, version: str, tensors: Mapping[str, torch.Tensor], *, flush: bool) -> None:
        """All of `tensors`; the version with the last call, and the flush of the cache if asked for."""
        raise NotImplementedError

    async def proved(self, version: str) -> None:
        """The server has it."""

    async def refused(self, version: str) -> None:
        """The server has something else."""

    async def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its bucket, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Bucket:
    places: tuple[Place, ...]
    num_bytes: int


def plan(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> list[Bucket]:
    """The buckets of a version, in the order of its tensors. Raises ConfigError for a tensor without elements or for none."""
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    if empty or not tensors:
        raise ConfigError(f"weights to send must be tensors with elements, got {empty[:3] or 'none'}. Leave them out")
    return [_laid_out(group) for group in _groups(tensors, bucket_bytes)]


def largest(buckets: Sequence[Bucket]) -> int:
    """Bytes of the memory that holds any one of them."""
    return max(bucket.num_bytes for bucket in buckets)


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Copy the tensors of `bucket` (any device and strides) into the uint8 vector `into`; returns its part that they fill."""
    with torch.no_grad():
        for place in bucket.places:
            room = into[place.start : place.end].view(place.dtype).view(place.shape)
            room.copy_(tensors[place.name])
    return into[: bucket.num_bytes]


async def packed(
    buckets: Sequence[Bucket], tensors: Mapping[str, torch.Tensor], blocks: Sequence[torch.Tensor]
) -> AsyncGenerator[tuple[int, Bucket, torch.Tensor]]:
    """(block, bucket, what fills of it) one after the other; the next one is packed meanwhile. To be closed (`aclosing`)."""

    def begin(number: int) -> asyncio.Task[torch.Tensor]:
        into = blocks[number % len(blocks)]
        return asyncio.create_task(asyncio.to_thread(pack, buckets[number], tensors, into))

    packing = begin(0)
    try:
        for number, bucket in enumerate(buckets):
            filled = await packing
            if number + 1 < len(buckets):
                packing = begin(number + 1)
            yield number % len(blocks), bucket, filled
    finally:
        # A thread cannot be stopped, and reads the tensors and writes into the blocks until it is done.
        await asyncio.shield(asyncio.wait([packing]))


def _groups(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if group and num_bytes + tensor.nbytes > bucket_bytes:
            yield group
            group, num_bytes = {}, 0
        group[name] = tensor
        num_bytes += tensor.nbytes
    yield group


def _laid_out(group: dict[str, torch.Tensor]) -> Bucket:
    places: list[Place] = []
    end = 0
    for name, tensor in sorted(group.items(), key=lambda item: -item[1].itemsize):
        start, end = end, end + tensor.nbytes
        places.append(Place(name, tensor.dtype, tuple(tensor.shape), start, end))
    return Bucket(tuple(places), end)
