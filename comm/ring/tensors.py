"""Names of tensor dtypes, and the one place where torch's warning about tensors over read-only memory is silenced."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from rondo.runtime.errors import CorruptData

with warnings.catch_warnings():
    # torch warns once a process that writing through a tensor over read-only memory is undefined. Nobody writes through
    # views of the ring: the one warning is spent here and does not appear in the middle of a user's log.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Raises CorruptData for a name that is no dtype: it was read from memory."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptData(f"a tensor's dtype must be one that torch has, got {name}.")
    return dtype
