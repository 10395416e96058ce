"""CUDA IPC: the handle by which another process opens a tensor's memory on the same device, without a copy.

Owns the handle as plain fields. Does not own what a reader makes of it (`roles/engines/sglang/weights_payload.py`), nor when the
memory may change: whoever shares a tensor keeps it, unchanged, until every reader has said that it is done.

torch's own handle of a storage (`_share_cuda_`) is the CUDA handle of its allocation, an offset, a counter file that keeps
the allocation while it is used elsewhere, and an event that says when it was written. The device is named by its UUID: processes
see devices under different numbers.

This code has not yet run on a GPU.

    payload = cuda_payload(bucket, share(tensor))    # in the trainer, on cuda:0
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rondo.runtime.errors import ConfigError


class SharedTensor(NamedTuple):
    """How another process opens a tensor. `offset` is the tensor's, in elements from its storage; `storage_offset_bytes` the
    storage's in the CUDA allocation."""

    offset: int
    device_uuid: str
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


def share(tensor: torch.Tensor) -> SharedTensor:
    """The handle of a CUDA tensor. Raises ConfigError for one that is not on a CUDA device."""
    if tensor.device.type != "cuda":
        raise ConfigError(f"a tensor for CUDA IPC must be on a cuda device, got {tensor.device}. Use the slab")
    device, *of_torch = tensor.detach().untyped_storage()._share_cuda_()
    return SharedTensor(tensor.storage_offset(), str(torch.cuda.get_device_properties(device).uuid), *of_torch)
