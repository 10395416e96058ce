"""Tensors over plain memory, without a copy, and the names of their dtypes.

Owns the one place where the warning of tensors over read-only memory is spent. Does not own the memory, nor who may look at it
when.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from rondo.comm.ring.records import STORAGE
from rondo.runtime.errors import CorruptData

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
