"""Tensors over plain memory: views without a copy, and how a list of named tensors lies in a block of bytes.

Owns the one place where tensors are made over memory that may be read-only, and the layout that slab and snapshot
share. Does not own the memory, nor who may look at it when.

    | tensor 0 | 0..63 B | tensor 1 | 0..63 B | ... | manifest, JSON: name, dtype, shape, offset of each, and what the
    owner adds

Invariant: tensors start at multiples of 64 bytes and gaps are zero, so equal tensors give equal bytes and equal
checksums.

    packer = Packer(block)
    packer.add("lm_head.weight", weight)
    at, num_bytes = packer.finish({"version": 3})
    tensors = unpack(block, manifest_of(block, at, num_bytes))   # views of the block
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import orjson
import torch

from rondo.comm.ring.records import ALIGN_BYTES, STORAGE, align
from rondo.comm.weights.sums import bucket_sum, in_threads
from rondo.runtime.errors import CorruptData, OutOfSpace

BUCKET_BYTES = 16 * 1024 * 1024
MANIFEST_BYTES_PER_TENSOR = 512
"""What the manifest takes for one tensor at most, with names of up to 256 characters."""

with warnings.catch_warnings():
    # torch warns once a process that writing through a tensor over read-only memory is undefined. Nobody writes through
    # views of the ring: the one warning is spent here and does not appear in the middle of a user's log.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over the memory of `array`, same shape, no copy; not to be written to where the array is read-only.

    `dtype` is a name in `records.STORAGE`: bfloat16 and float8 arrive as integers and are reinterpreted. Raises
    ValueError when the array's dtype is not the one that stores `dtype`.
    """
    if array.dtype != STORAGE.get(dtype):
        raise ValueError(f"an array for dtype {dtype} must have dtype {STORAGE.get(dtype)}, got {array.dtype}.")
    return torch.from_numpy(array).view(torch_dtype(dtype))


def as_array(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """The array over the memory of a CPU tensor, and the dtype name to put it into a ring with. No copy."""
    name = dtype_name(tensor.dtype)
    if name not in STORAGE:
        raise ValueError(f"a tensor for the ring must have one of the dtypes {', '.join(STORAGE)}, got {name}.")
    storage = torch_dtype(STORAGE[name].name)
    return tensor.detach().view(storage).numpy(), name


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Raises CorruptData for a name that is no dtype: it was read from memory."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptData(f"a tensor's dtype must be one that torch has, got {name}.")
    return dtype


class Packer:
    """Copies tensors into `block` one behind the other. With `checksums`, bytes are summed bucket by bucket as they
    come."""

    def __init__(self, block: memoryview, *, checksums: bool = False, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._block = block
        self._bytes = np.frombuffer(block, np.uint8)
        self._end = 0
        self._summed = 0
        self._tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._checksums: list[int] | None = [] if checksums else None
        self._bucket_bytes = bucket_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` (any dtype, device and strides). Raises OutOfSpace when it does not fit, ValueError for a name
        twice."""
        start, end = self.place(name, tensor)
        if end > start:
            into = torch.from_numpy(self._bytes[start:end]).view(tensor.dtype).view(tensor.shape)
            into.copy_(tensor.detach())
        self._sum(end // self._bucket_bytes * self._bucket_bytes)

    def place(self, name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Where the bytes of `tensor` begin and end; whoever asks copies them. Raises as `add`."""
        if name in self._tensors:
            raise ValueError(f"tensors of one block must have different names, got {name} twice.")
        start, end = align(self._end), align(self._end) + tensor.numel() * tensor.element_size()
        if end > len(self._bytes):
            raise OutOfSpace(
                f"tensor {name} must end within {len(self._bytes)} bytes, got {end}. Make the segment larger."
            )
        self._bytes[self._end : start] = 0
        self._tensors[name] = (dtype_name(tensor.dtype), tuple(tensor.shape), start)
        self._end = end
        return start, end

    def finish(self, extra: dict[str, Any] | None = None, *, checksums: list[int] | None = None) -> tuple[int, int]:
        """Write the manifest behind the tensors; returns its offset and its bytes. `extra` must be JSON-able.

        `checksums` of all buckets, from whoever has summed them while it copied.
        """
        if checksums is None:
            self._sum(self._end)
        else:
            self._checksums = checksums
        manifest = {
            "tensors": self._tensors,
            "num_bytes": self._end,
            "bucket_bytes": self._bucket_bytes,
            "checksums": self._checksums,
        }
        encoded = orjson.dumps(manifest | (extra or {}), option=orjson.OPT_SERIALIZE_NUMPY)
        start = align(self._end)
        if start + len(encoded) > len(self._bytes):
            raise OutOfSpace(
                f"the manifest of {len(self._tensors)} tensors must end within {len(self._bytes)} bytes, "
                f"got {start + len(encoded)}. Make the segment larger."
            )
        self._block[start : start + len(encoded)] = encoded
        return start, len(encoded)

    def _sum(self, end: int) -> None:
        if self._checksums is None:
            return
        while self._summed < end:
            until = min(self._summed + self._bucket_bytes, end)
            self._checksums.append(bucket_sum(self._block[self._summed : until]))
            self._summed = until


def manifest_of(block: memoryview, at: int, num_bytes: int) -> dict[str, Any]:
    """The manifest at byte `at`. Raises CorruptData when it is not one."""
    try:
        manifest = orjson.loads(block[at : at + num_bytes])
    except orjson.JSONDecodeError as error:
        raise CorruptData(f"the manifest at byte {at} must be JSON, got {error}.") from error
    if not isinstance(manifest, dict) or not {"tensors", "num_bytes", "checksums"} <= manifest.keys():
        raise CorruptData(f"the manifest at byte {at} must name tensors and their checksums, got something else.")
    return manifest


def verify(block: memoryview, manifest: dict[str, Any], *, num_threads: int = 1) -> None:
    """Compare every bucket with its checksum. Raises CorruptData at the first that differs, naming its tensors."""
    size, end = manifest["bucket_bytes"], manifest["num_bytes"]
    starts = range(0, end, size)
    if len(starts) != len(manifest["checksums"]):
        raise CorruptData(f"{end} bytes must have {len(starts)} checksums, got {len(manifest['checksums'])}.")
    sums = in_threads(bucket_sum, ((block[start : min(start + size, end)],) for start in starts), num_threads)
    for start, wanted, found in zip(starts, manifest["checksums"], sums, strict=True):
        if found != wanted:
            names = ", ".join(_names_between(manifest, start, start + size))
            raise CorruptData(
                f"bytes {start} to {start + size} ({names}) must have checksum {wanted:08x}, got {found:08x}."
            )


def unpack(block: memoryview, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor as a view of `block`, in the order they were added."""
    return {name: _view(block, name, *fields) for name, fields in manifest["tensors"].items()}


def _view(block: memoryview, name: str, dtype_name: str, shape: list[int], start: int) -> torch.Tensor:
    dtype = torch_dtype(dtype_name)
    num_bytes = prod(shape) * dtype.itemsize
    if start % ALIGN_BYTES or not 0 <= start <= start + num_bytes <= block.nbytes:
        raise CorruptData(
            f"tensor {name} must lie aligned within {block.nbytes} bytes, got {start} to {start + num_bytes}."
        )
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.frombuffer(block, np.uint8, num_bytes, start)).view(dtype).view(shape)


def _names_between(manifest: dict[str, Any], start: int, end: int) -> Iterator[str]:
    for name, (dtype, shape, at) in manifest["tensors"].items():
        if at < end and at + prod(shape) * torch_dtype(dtype).itemsize > start:
            yield name
