"""The bytes of SGLang's tensor update: a pickle that names where a bucket lies, written without SGLang and without pickling.

`/update_weights_from_tensor` takes what SGLang's own client makes with ForkingPickler: a handle of shared memory, and a list of
its own class `FlattenedTensorMetadata`. The server reads it with an unpickler that knows an exact list of names. Pickling needs
that class importable here, and rondo's environment never has SGLang in it; a process of the server's interpreter would cost ten
seconds and needs its path, which an external server does not tell. So the opcodes are written one by one: a dozen kinds of
value, from numbers and names that rondo knows itself. Nothing is ever unpickled here.

    {"flattened_tensor": <uint8 tensor over shared memory, or over CUDA IPC>,
     "metadata": [FlattenedTensorMetadata(name, shape, dtype, start_idx, end_idx, numel), ...]}     indices in bytes

Owns these bytes. Does not own the memory, which stays as it is until the server has answered (`weights_tensor.py`).
"""

from __future__ import annotations

import base64
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.comm.ring.tensors import dtype_name
from rondo.comm.weights.ipc import SharedTensor
from rondo.roles.engines.sglang.weights_buckets import Bucket, Place

_BUCKET = "sglang.srt.weight_sync.tensor_bucket"
_REDUCTIONS = "torch.multiprocessing.reductions"
_CUDA = "sglang.srt.utils.patch_torch"


@dataclass(frozen=True, slots=True)
class _Name:
    """Something that the reader imports."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Call:
    function: _Name
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Instance:
    """An object made without its constructor, whose fields are set."""

    kind: _Name
    fields: Mapping[str, Any]


def shared_memory_payload(bucket: Bucket, handle: str) -> str:
    """Base64, for a bucket at the beginning of the POSIX shared memory `handle` ("/name"), laid out as `SharedBytes` does."""
    # Without a manager's address, the reader's torch starts its own helper process, which ends with it.
    memory = _Call(
        _Name(_REDUCTIONS, "rebuild_storage_filename"),
        (_Name("torch.storage", "UntypedStorage"), b"", handle.encode(), bucket.num_bytes),
    )
    typed = _Call(_Name(_REDUCTIONS, "rebuild_typed_storage"), (memory, _Name("torch", "uint8")))
    size = _size((bucket.num_bytes,))
    tensor = _Call(_Name(_REDUCTIONS, "rebuild_tensor"), (_Name("torch", "Tensor"), typed, (0, size, (1,), False)))
    return _encoded(tensor, bucket.places)


def cuda_payload(bucket: Bucket, shared: SharedTensor) -> str:
    """Base64, for a bucket at the beginning of a uint8 tensor on a GPU; each reader needs a handle of its own."""
    tensor = _Call(
        _Name(_CUDA, "_rebuild_cuda_tensor_modified"),
        (
            _Name("torch", "Tensor"), _size((bucket.num_bytes,)), (1,), shared.offset, _Name("torch.storage", "TypedStorage"),
            _Name("torch", "uint8"), shared.device_uuid, shared.handle, shared.storage_bytes, shared.storage_offset_bytes, False,
            shared.counter_handle, shared.counter_offset, shared.event_handle, shared.event_sync_required,
        ),
    )  # fmt: skip
    return _encoded(tensor, bucket.places)


def _encoded(tensor: _Call, places: Sequence[Place]) -> str:
    metadata = [
        _Instance(
            _Name(_BUCKET, "FlattenedTensorMetadata"),
            {
                "name": place.name,
                "shape": _size(place.shape),
                "dtype": _Name("torch", dtype_name(place.dtype)),
                "start_idx": place.start,
                "end_idx": place.end,
                "numel": place.end - place.start,
            },
        )
        for place in places
    ]
    out = [pickle.PROTO, b"\x03"]
    _write({"flattened_tensor": tensor, "metadata": metadata}, out)
    out.append(pickle.STOP)
    return base64.b64encode(b"".join(out)).decode()


def _size(shape: tuple[int, ...]) -> _Call:
    return _Call(_Name("torch", "Size"), (shape,))


def _write(value: Any, out: list[bytes]) -> None:
    """Append the opcodes of protocol 3 that leave `value` on the reader's stack."""
    match value:
        case bool():
            out.append(pickle.NEWTRUE if value else pickle.NEWFALSE)
        case int():
            encoded = pickle.encode_long(value)
            out.append(pickle.LONG1 + bytes([len(encoded)]) + encoded)
        case str():
            encoded = value.encode()
            out.append(pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded)
        case bytes():
            out.append(pickle.BINBYTES + struct.pack("<I", len(value)) + value)
        case tuple():
            _write_all(value, out, pickle.MARK, pickle.TUPLE)
        case list():
            _write_all(value, out, pickle.EMPTY_LIST + pickle.MARK, pickle.APPENDS)
        case dict():
            both = [each for item in value.items() for each in item]
            _write_all(both, out, pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS)
        case _Name():
            out.append(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        case _Call():
            _write(value.function, out)
            _write(value.arguments, out)
            out.append(pickle.REDUCE)
        case _Instance():
            _write(value.kind, out)
            out.append(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            _write(dict(value.fields), out)
            out.append(pickle.BUILD)
        case _:
            raise TypeError(f"a value of the payload must be one of the kinds above, got {type(value).__name__}.")


def _write_all(values: Sequence[Any], out: list[bytes], before: bytes, after: bytes) -> None:
    out.append(before)
    for value in values:
        _write(value, out)
    out.append(after)
