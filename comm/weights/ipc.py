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

from math import prod
from typing import Any

import orjson
import torch
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rondo.comm.ring.tensors import dtype_name, torch_dtype
from rondo.runtime.errors import ConfigError, CorruptData


@dataclass(frozen=True, slots=True, config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"))
class SharedTensor:
    """How another process opens a tensor: names of dtype and device, shape and strides in elements, and torch's handle.

    `offset` is the tensor's, in elements from its storage; `storage_offset_bytes` the storage's in the CUDA allocation.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    strides: tuple[NonNegativeInt, ...]
    offset: NonNegativeInt
    device_uuid: str
    handle: bytes
    storage_bytes: NonNegativeInt
    storage_offset_bytes: NonNegativeInt
    counter_handle: bytes
    counter_offset: NonNegativeInt
    event_handle: bytes
    event_sync_required: bool

    def to_json(self) -> dict[str, Any]:
        """Bytes as base64."""
        fields: dict[str, Any] = TypeAdapter(SharedTensor).dump_python(self, mode="json")
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> SharedTensor:
        """Raises CorruptData for missing fields, wrong types, or a tensor that does not lie inside its storage."""
        try:
            shared = TypeAdapter(cls).validate_json(orjson.dumps(fields))
        except ValidationError as error:
            raise CorruptData(f"the handle of a shared tensor must have all its fields, got {error}.") from error
        if len(shared.shape) != len(shared.strides):
            raise CorruptData(
                f"a shared tensor must have a stride a dimension, got {shared.shape} and {shared.strides}."
            )
        last = shared.offset + sum((n - 1) * stride for n, stride in zip(shared.shape, shared.strides, strict=True))
        if prod(shared.shape) and (last + 1) * torch_dtype(shared.dtype).itemsize > shared.storage_bytes:
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
