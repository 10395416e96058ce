"""NCCL outside torch: `nccl4py` and `pynccl` behind one small interface of raw bytes.

Owns the calls of the two packages, the exchange of NCCL's unique id through the store, and the wait for a CUDA stream with a
deadline. Does not own threads or deadlines of callers (`communicators.py`). Both packages are extras, imported only when a
group wants them.

    Bytes(Nccl4Py(), store, rank, size, "cuda:0", timeout_s=60).broadcast(data, 0, 60)

    nccl4py    NVIDIA's bindings; the choice when a communicator must live outside torch
    pynccl     one author's ctypes of 2020 over NCCL 2.7's calls; needs numba; for machines that have it already

Written from the packages' own sources (nccl4py 0.6.0, pynccl 0.1.2); neither has run on GPUs here yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch

from rondo.runtime.errors import ConfigError, DeadlineExceeded
from rondo.runtime.waits import waiter

UNIQUE_ID_BYTES = 128
"""Size of NCCL's unique id: `ncclUniqueId` of nccl.h."""

Operation = Literal["broadcast", "send", "recv"]

_ID_KEY = "unique-id"
_MAX_POST_BYTES = 1 << 30
"""pynccl declares counts as C ints; a post stays far below 2 GiB."""
_POLL_S = 0.0005


class Nccl4Py:
    """NVIDIA's `nccl4py` (0.6): `nccl.core.Communicator`."""

    def __init__(self) -> None:
        with _installed("nccl4py"):
            self._nccl = importlib.import_module("nccl.core")
            if self._nccl.get_version().libnccl is None:
                raise ImportError("no libnccl.so.2")
        self._comm: Any = None

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id().as_bytes)

    def init(self, size: int, rank: int, unique_id: bytes, device: int) -> None:
        self._comm = self._nccl.Communicator.init(size, rank, self._nccl.UniqueId.from_bytes(unique_id))

    def post(self, operation: Operation, data: Any, rank: int, stream: int) -> None:
        tensors = (data, data) if operation == "broadcast" else (data,)
        getattr(self._comm, operation)(*tensors, rank, stream=stream)

    def abort(self) -> None:
        if self._comm is not None:
            self._comm.abort()

    def destroy(self) -> None:
        self._comm.destroy()


class PyNccl:
    """`pynccl` (0.1.2): `NcclWrp` and the calls under it. Knows no bfloat16, so everything goes as bytes."""

    def __init__(self) -> None:
        with _installed("pynccl"):
            self._api = importlib.import_module("pynccl.api")
            self._binding = importlib.import_module("pynccl.binding")
            self._api.Nccl()  # numba looks for the driver here, and its error is an ImportError too
        self._wrap: Any = None

    def unique_id(self) -> bytes:
        # It declares the id four times as long as NCCL does; NCCL writes the first 128 bytes, zeros among them.
        made = self._api.Nccl().get_unique_id()
        return ctypes.string_at(ctypes.addressof(made), UNIQUE_ID_BYTES)

    def init(self, size: int, rank: int, unique_id: bytes, device: int) -> None:
        shared = self._binding.ncclUniqueId()
        ctypes.memmove(ctypes.addressof(shared), unique_id, len(unique_id))
        self._wrap = self._api.NcclWrp(size, rank, device)
        self._wrap.set_nuid(shared)
        self._wrap.init_comm()

    def post(self, operation: Operation, data: Any, rank: int, stream: int) -> None:
        call = getattr(self._wrap.nk, {"broadcast": "bcast", "send": "pp_send", "recv": "pp_recv"}[operation])
        call(data.data_ptr(), data.numel(), self._binding.ncclUint8, rank, self._wrap.comm_i, stream)

    def abort(self) -> None:
        if self._wrap is not None:
            self._wrap.abort_comm()

    def destroy(self) -> None:
        self._wrap.del_comm()


Library = Nccl4Py | PyNccl
"""NCCL as an extra offers it. `stream` is a `cudaStream_t` as an int; calls post work and return."""
LIBRARIES: dict[str, type[Library]] = {"nccl4py": Nccl4Py, "pynccl": PyNccl}


@contextlib.contextmanager
def _installed(extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"backend {extra} must be installed with what it needs, got {text}. Run pip install 'rondo-rl[{extra}]'"
        ) from error


class Bytes:
    """Raw bytes over a library outside torch. The unique id that NCCL wants goes through the store, once a group."""

    interrupted_by_abort = True

    def __init__(self, library: Library, store: Any, rank: int, size: int, device: str, timeout_s: float) -> None:
        self._library = library
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        unique_id = exchange_id(library, store, rank, timeout_s)
        library.init(size, rank, unique_id, self._device.index or 0)

    def move(self, operation: Operation, data: Any, rank: int, timeout_s: float) -> None:
        stream = int(torch.cuda.current_stream(self._device).cuda_stream) if self._device.type == "cuda" else 0
        for piece in data.split(_MAX_POST_BYTES):
            self._library.post(operation, piece, rank, stream)
        self._finish(operation, timeout_s)

    def abort(self) -> None:
        self._library.abort()

    def close(self) -> None:
        self._library.destroy()

    def _finish(self, name: str, timeout_s: float) -> None:
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        due = time.monotonic() + timeout_s
        while not event.query():  # an event has no wait with a deadline
            if time.monotonic() > due:
                raise DeadlineExceeded(name, waiter(), "the group", timeout_s)
            time.sleep(_POLL_S)


def exchange_id(library: Library, store: Any, rank: int, timeout_s: float) -> bytes:
    """NCCL's unique id of this group: rank 0 makes it, the others read it from the store, by a deadline of torch's."""
    if rank == 0:
        made = library.unique_id()
        store.set(_ID_KEY, made)
        return made
    store.wait([_ID_KEY], datetime.timedelta(seconds=timeout_s))
    got = bytes(store.get(_ID_KEY))
    if len(got) != UNIQUE_ID_BYTES:
        raise ConfigError(
            f"NCCL's unique id must be {UNIQUE_ID_BYTES} bytes, got {len(got)}. Use one backend in all members"
        )
    return got
