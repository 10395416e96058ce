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
from collections.abc import Sequence
from typing import Any, NamedTuple

from rondo.comm.ring.tensors import dtype_name
from rondo.comm.weights.ipc import SharedTensor
from rondo.roles.engines.sglang.weights_buckets import Bucket, Place


class _Name(str):
    """Something that the reader imports: "module name"."""


class _Call(NamedTuple):
    """What the reader makes by calling something that it imports."""

    function: _Name
    arguments: tuple[Any, ...]


_TENSOR, _BYTE = _Name("torch Tensor"), _Name("torch uint8")


def shared_memory_payload(bucket: Bucket, handle: str) -> str:
    """Base64, for a bucket at the beginning of the POSIX shared memory `handle` ("/name"), laid out as `SharedBytes` does."""

    def rebuilt(what: str, *arguments: Any) -> _Call:
        return _Call(_Name(f"torch.multiprocessing.reductions rebuild_{what}"), arguments)

    # Without a manager's address, the reader's torch starts its own helper process, which ends with it.
    storage = _Name("torch.storage UntypedStorage")
    memory = rebuilt("storage_filename", storage, b"", handle.encode(), bucket.num_bytes)
    how = 0, _size((bucket.num_bytes,)), (1,), False
    return _encoded(rebuilt("tensor", _TENSOR, rebuilt("typed_storage", memory, _BYTE), how), bucket.places)


def cuda_payload(bucket: Bucket, shared: SharedTensor) -> str:
    """Base64, for a bucket at the beginning of a uint8 tensor on a GPU; each reader needs a handle of its own."""
    tensor = _Call(
        _Name("sglang.srt.utils.patch_torch _rebuild_cuda_tensor_modified"),
        (
            _TENSOR, _size((bucket.num_bytes,)), (1,), shared.offset, _Name("torch.storage TypedStorage"), _BYTE,
            shared.device_uuid, shared.handle, shared.storage_bytes, shared.storage_offset_bytes, False, shared.counter_handle,
            shared.counter_offset, shared.event_handle, shared.event_sync_required,
        ),
    )  # fmt: skip
    return _encoded(tensor, bucket.places)


def _encoded(tensor: _Call, places: Sequence[Place]) -> str:
    described = _Name("sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata")
    metadata = [
        _Call(described, (it.name, _size(it.shape), _Name(f"torch {dtype_name(it.dtype)}"), it.start, it.end, it.end - it.start))
        for it in places
    ]  # fmt: skip
    out = [pickle.PROTO, b"\x03"]
    _write({"flattened_tensor": tensor, "metadata": metadata}, out)
    out.append(pickle.STOP)
    return base64.b64encode(b"".join(out)).decode()


def _size(shape: tuple[int, ...]) -> _Call:
    return _Call(_Name("torch Size"), (shape,))


def _write(value: Any, out: list[bytes]) -> None:
    """Append the opcodes of protocol 3 that leave `value` on the reader's stack."""
    match value:
        case bool():
            out.append(pickle.NEWTRUE if value else pickle.NEWFALSE)
        case int():
            encoded = pickle.encode_long(value)
            out.append(pickle.LONG1 + bytes([len(encoded)]) + encoded)
        case _Name():
            out.append(pickle.GLOBAL + value.replace(" ", "\n").encode() + b"\n")
        case str():
            encoded = value.encode()
            out.append(pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded)
        case bytes():
            out.append(pickle.BINBYTES + struct.pack("<I", len(value)) + value)
        case _Call():
            _write(value.function, out)
            _write(value.arguments, out)
            out.append(pickle.REDUCE)
        case tuple():
            _write_all(value, out, pickle.MARK, pickle.TUPLE)
        case list():
            _write_all(value, out, pickle.EMPTY_LIST + pickle.MARK, pickle.APPENDS)
        case dict():
            both = [each for item in value.items() for each in item]
            _write_all(both, out, pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS)
        case _:
            raise TypeError(f"a value of the payload must be one of the kinds above, got {type(value).__name__}.")


def _write_all(values: Sequence[Any], out: list[bytes], before: bytes, after: bytes) -> None:
    out.append(before)
    for value in values:
        _write(value, out)
    out.append(after)
