"""What a version is made of: its tensors, where each lies in one block of bytes, and a sum a bucket of them.

Owns the description, the views that it gives and the proof of a block against it. Does not own the memory, nor who writes it
(`slab.py`) or receives it (`held.py`).

    | tensor 0 | 0..63 B | tensor 1 | 0..63 B | ... | this, as JSON: name -> [dtype, shape, offset], sums, what the owner adds

Invariant: tensors start at multiples of 64 bytes and gaps are zero, so equal tensors give equal bytes, equal sums and an equal
checksum, which names the version's content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import orjson
import torch

from rondo.comm.ring.records import ALIGN_BYTES
from rondo.comm.ring.tensors import torch_dtype
from rondo.comm.weights.sums import bucket_sum, in_threads
from rondo.runtime.errors import CorruptData

BUCKET_BYTES = 16 * 1024 * 1024
BYTES_PER_TENSOR = 512
"""What the manifest takes for one tensor at most, with names of up to 256 characters."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`tensors`: name -> [dtype, shape, offset in bytes]; `sums` of the buckets, none where only the manifest has a checksum.
    `raw` is its JSON, `more` what the owner added."""

    raw: bytes
    tensors: dict[str, Any]
    num_bytes: int
    bucket_bytes: int
    sums: tuple[int, ...]
    more: dict[str, Any]

    @classmethod
    def parse(cls, raw: bytes, checksum: int, what: str = "a manifest", *, summed: bool = True) -> Manifest:
        """Raises CorruptData for one without that checksum, or that contradicts itself; `what` names it."""
        found = manifest_checksum(raw)
        if found != checksum:
            raise CorruptData(f"{what} must have checksum {checksum:016x}, got {found:016x}.")
        try:
            more = orjson.loads(raw)
            tensors, num_bytes, bucket_bytes, sums = (
                more.pop(name) for name in ("tensors", "num_bytes", "bucket_bytes", "checksums")
            )
            sizes = type(num_bytes) is int and type(bucket_bytes) is int and num_bytes >= 0 and bucket_bytes > 0
            if not sizes or len(sums) != (-(-num_bytes // bucket_bytes) if summed else 0):
                raise ValueError(f"{num_bytes!r} bytes in buckets of {bucket_bytes!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptData(
                f"{what} must name tensors, and one sum for each bucket of their bytes, got {error}."
            ) from error
        return cls(raw, tensors, num_bytes, bucket_bytes, tuple(sums), more)

    @property
    def num_buckets(self) -> int:
        return len(self.sums)

    def bounds(self, index: int) -> tuple[int, int]:
        """Where bucket `index` begins and ends, in bytes."""
        return index * self.bucket_bytes, min((index + 1) * self.bucket_bytes, self.num_bytes)

    def same_layout(self, other: Manifest) -> bool:
        """Whether both have the same tensors at the same places, cut into the same buckets."""
        sizes = (self.num_bytes, self.bucket_bytes) == (other.num_bytes, other.bucket_bytes)
        return sizes and list(self.tensors.items()) == list(other.tensors.items())

    def views(self, block: memoryview | np.ndarray) -> dict[str, torch.Tensor]:
        """Every tensor as a view of `block`, in the order they were added. Raises CorruptData for one that points out of it."""
        data = np.frombuffer(block, np.uint8)
        return {name: _view(data, name, *fields) for name, fields in self.tensors.items()}

    def prove(self, block: memoryview | np.ndarray, *, num_threads: int = 1, known: Sequence[int] = ()) -> None:
        """Compare every bucket with its sum. Raises CorruptData at the first that differs, naming its tensors.

        `known`: sums that the caller has found of the first buckets, in these very bytes; a wrong one is found again.
        """
        data = np.frombuffer(block, np.uint8)
        found = list(known[: self.num_buckets])
        found += [-1] * (self.num_buckets - len(found))
        open_ = [index for index, wanted in enumerate(self.sums) if found[index] != wanted]
        sums = in_threads(
            lambda index: bucket_sum(data[slice(*self.bounds(index))]), ((i,) for i in open_), num_threads
        )
        for index, got in zip(open_, sums, strict=True):
            if got != self.sums[index]:
                start, end = self.bounds(index)
                names = ", ".join(
                    name
                    for name, (dtype, shape, at) in self.tensors.items()
                    if at < end and at + prod(shape) * torch_dtype(dtype).itemsize > start
                )
                raise CorruptData(
                    f"bytes {start} to {end} ({names}) must have checksum {self.sums[index]:08x}, got {got:08x}."
                )


def manifest_checksum(manifest: memoryview | bytes) -> int:
    """What names a version's content: 64 bits of BLAKE2b over its manifest, which holds the sums of all buckets."""
    return int.from_bytes(hashlib.blake2b(manifest, digest_size=8).digest(), "little")


def _view(data: np.ndarray, name: str, dtype_name: str, shape: list[int], start: int) -> torch.Tensor:
    dtype = torch_dtype(dtype_name)
    num_bytes = prod(shape) * dtype.itemsize
    if start % ALIGN_BYTES or not 0 <= start <= start + num_bytes <= data.size:
        raise CorruptData(
            f"tensor {name} must lie aligned within {data.size} bytes, got {start} to {start + num_bytes}."
        )
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data[start : start + num_bytes]).view(dtype).view(shape)
