"""CUDA IPC: a tensor on a device, opened by another process on the same device, without a copy and without pickle.

Owns the handle as plain fields. Does not own when the memory may change: whoever shares a tensor keeps it, unchanged, until
every reader has said that it is done (the hold of a slot says so in the slab).

torch's own handle of a storage (`_share_cuda_`) is the CUDA handle of its allocation, an offset, a counter file that keeps
the allocation while it is used elsewhere, and an event that says when it was written. Its fields are bytes and numbers, so
they travel as JSON; the receiver checks dtype, shape and bounds before it makes a tensor. The device is named by its UUID:
processes see devices under different numbers.

This code has not yet run on a GPU.

    header = share(weight).to_json()                 # in the trainer, on cuda:0
    weight = opened(SharedTensor.from_json(header))  # in an engine on the same device
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from rondo.comm.ring.tensors import dtype_name, torch_dtype
from rondo.runtime.errors import ConfigError, CorruptData

_BYTES = ("handle", "counter_handle", "event_handle")


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """How another process opens a tensor: names of dtype and device, shape and strides in elements, and torch's handle.

    `offset` is the tensor's, in elements from its storage; `storage_offset_bytes` the storage's in the CUDA allocation.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device_uuid: str
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {name: base64.b64encode(fields[name]).decode() for name in _BYTES}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SharedTensor:
        """Raises CorruptData for missing fields, wrong types, or a tensor that does not lie inside its storage."""
        try:
            raw = {name: base64.b64decode(fields[name], validate=True) for name in _BYTES}
            numbers = {
                name: int(fields[name])
                for name in ("offset", "storage_bytes", "storage_offset_bytes", "counter_offset")
            }
            shape, strides = (tuple(int(n) for n in fields[name]) for name in ("shape", "strides"))
            shared = cls(
                dtype=str(fields["dtype"]), shape=shape, strides=strides, device_uuid=str(fields["device_uuid"]),
                event_sync_required=bool(fields["event_sync_required"]), offset=numbers["offset"],
                storage_bytes=numbers["storage_bytes"], storage_offset_bytes=numbers["storage_offset_bytes"],
                counter_offset=numbers["counter_offset"], handle=raw["handle"], counter_handle=raw["counter_handle"],
                event_handle=raw["event_handle"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise CorruptData(f"the handle of a shared tensor must have all its fields, got {error!r}.") from error
        if len(shape) != len(strides) or min((*shape, *strides, *numbers.values()), default=0) < 0:
            raise CorruptData(f"a shared tensor must have a stride a dimension, got {shape} and {strides}.")
        last = shared.offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if prod(shape) and (last + 1) * torch_dtype(shared.dtype).itemsize > shared.storage_bytes:
            raise CorruptData(f"a shared tensor must lie inside its {shared.storage_bytes} bytes, got element {last}.")
        return shared


def share(tensor: torch.Tensor) -> SharedTensor:
    """The handle of a CUDA tensor. Raises ConfigError for one that is not on a CUDA device."""
    if tensor.device.type != "cuda":
        raise ConfigError(f"a tensor for CUDA IPC must be on a cuda device, got {tensor.device}. Use the slab")
    tensor = tensor.detach()
    (
        device, handle, storage_bytes, storage_offset_bytes, counter_handle, counter_offset, event_handle, sync,
    ) = tensor.untyped_storage()._share_cuda_()  # fmt: skip
    return SharedTensor(
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        offset=tensor.storage_offset(),
        device_uuid=_uuid(device),
        handle=handle,
        storage_bytes=storage_bytes,
        storage_offset_bytes=storage_offset_bytes,
        counter_handle=counter_handle,
        counter_offset=counter_offset,
        event_handle=event_handle,
        event_sync_required=sync,
    )


def opened(shared: SharedTensor) -> torch.Tensor:
    """The tensor in this process, over the same memory. Raises ConfigError when this process does not see its device."""
    dtype = torch_dtype(shared.dtype)
    device = next((i for i in range(torch.cuda.device_count()) if _uuid(i) == shared.device_uuid), None)
    if device is None:
        raise ConfigError(
            f"a tensor shared by CUDA IPC must lie on a device of this process, got {shared.device_uuid}. Use the slab"
        )
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(
        device, shared.handle, shared.storage_bytes, shared.storage_offset_bytes, shared.counter_handle,
        shared.counter_offset, shared.event_handle, shared.event_sync_required,
    )  # fmt: skip
    empty = torch.empty(0, dtype=dtype, device=f"cuda:{device}")
    return empty.set_(storage, shared.offset, shared.shape, shared.strides)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
