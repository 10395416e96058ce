"""Buckets: which tensors of a version travel together, and where each lies in the bytes that do.

Owns the layout that SGLang calls `flattened_bucket`: tensors as raw bytes, one behind the other, without gaps. Does not own
how a bucket travels (`weights_tensor.py`, `weights_distributed.py`).

    bucket_bytes 24:   | w float32 [4]   b bfloat16 [3] |   | v float32 [9], larger than a bucket: alone |
                       0                16            22    0                                          36

Invariant: every tensor of a version is in exactly one bucket, and starts at a multiple of its element size, which a server that
views the bytes demands: wide elements come first. No bucket but one of a single tensor is larger than asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rondo.runtime.errors import ConfigError


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
