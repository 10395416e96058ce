"""Carriers: what carries the bytes of one epoch of a process group. One call over four libraries.

    backend   library                              carries                 needs
    gloo      torch, `ProcessGroupGloo`            bytes on the CPU        nothing more
    nccl      torch, `ProcessGroupNCCL`            bytes on a GPU          torch for CUDA; the default there
    nccl4py   NVIDIA's bindings, outside torch     bytes on a GPU          `pip install 'rondo-rl[nccl4py]'`
    pynccl    ctypes over NCCL 2.7's calls, old    bytes on a GPU          `pip install 'rondo-rl[pynccl]'`

Owns the calls of torch's two libraries and the choice; `nccl_extras.py` has the others. Does not own threads, deadlines beyond
one call, or who is a member: `communicators.py` runs every call here on a thread that it may abandon, since any of these
libraries may block longer than it was asked to.

`nccl`, `nccl4py` and `pynccl` are written from the libraries' own sources and have not run on GPUs yet.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rondo.comm.groups.nccl_extras import LIBRARIES, Bytes, Operation
from rondo.runtime.errors import ConfigError


class Carrier(Protocol):
    """What `communicators.py` needs of a library. Tensors are contiguous, on its device, and raw bytes."""

    interrupted_by_abort: bool
    """Whether `abort` from another thread ends a call that blocks."""

    def move(self, operation: Operation, data: Any, rank: int, timeout_s: float) -> None:
        """Broadcasts from, sends to or receives from `rank`."""

    def abort(self) -> None: ...
    def close(self) -> None: ...


def check_backend(backend: str, device: str) -> None:
    """Raises ConfigError when this process cannot use `backend` on `device` ("cpu", "cuda:1")."""
    on_gpu = device != "cpu"
    if on_gpu == (backend == "gloo"):
        fitting = "nccl, nccl4py or pynccl" if on_gpu else "gloo"
        raise ConfigError(f"backend must fit the device {device}, got {backend}. Use {fitting}")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ConfigError("backend nccl must be part of torch, got a torch without it. Install torch for CUDA")
    if backend in LIBRARIES:
        LIBRARIES[backend]()


def open_carrier(backend: str, store: Any, rank: int, size: int, device: str, timeout_s: float) -> Carrier:
    """Meets the other ranks in `store`, which no other group uses, and makes their group. Blocks; see `check_backend`."""
    if backend == "gloo":
        return Gloo(store, rank, size, timeout_s)
    if backend == "nccl":
        return Nccl(store, rank, size, device, timeout_s)
    return Bytes(LIBRARIES[backend](), store, rank, size, device, timeout_s)


# ---------------------------------------------------------------------------------------------- torch


class OfTorch:
    """What both of torch's groups do alike. A wait blocks the calling thread until the call is done, or to its deadline."""

    _group: Any

    def move(self, operation: Operation, data: Any, rank: int, timeout_s: float) -> None:
        if operation == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = rank, span(timeout_s)
            work = self._group.broadcast([data], options)
        else:
            work = getattr(self._group, operation)([data], rank, 0)
        work.wait(span(timeout_s))


class Gloo(OfTorch):
    """`ProcessGroupGloo`, with a full mesh of connections made at once."""

    interrupted_by_abort = False  # gloo has no abort: torch's method of that name does nothing there

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = span(timeout_s)
        # With lazy connections every first use can block for 30 s beside its deadline, and taking the group down for minutes.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        where = {"interface": interface.partition(",")[0]} if interface else {"hostname": _my_address(store)}
        options._devices = [dist.ProcessGroupGloo.create_device(**where, lazy_init=False)]
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def close(self) -> None:
        """Takes the group down; its sockets close, so peers that wait for this member fail at once."""
        self._group = None

    abort = close


class Nccl(OfTorch):
    """`ProcessGroupNCCL` on one device."""

    interrupted_by_abort = True

    def __init__(self, store: Any, rank: int, size: int, device: str, timeout_s: float) -> None:
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = span(timeout_s)
        with _survives_errors():
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(self._device)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()


@contextlib.contextmanager
def _survives_errors() -> Iterator[None]:
    """A group made inside cleans its communicators up after an error; torch's default is to end the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # CleanUpOnly, read by the constructor
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def span(seconds: float) -> datetime.timedelta:
    """Seconds as torch wants them: whole milliseconds, at least one."""
    return datetime.timedelta(milliseconds=max(1, round(seconds * 1000)))


def _my_address(store: Any) -> str:
    """The address by which this process reaches the store: the others reach it there too."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return local_address(store.host, store.port)


def local_address(host: str | None, port: int) -> str:
    """The address of this machine by which `host` reaches it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # connecting a datagram socket sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])
