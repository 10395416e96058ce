"""What `rondo check --probe` tries, each in a process of its own: a disk, shared memory, devices, and what carries bytes between.

Jobs of the nursery. Each writes one JSON object to the file that its first argument names, and makes no other file with a name,
so that nothing is left of one that is killed. Owns the trying. Does not own deadlines, nor what is told of it (`probe.py`).

    Job("rondo.launch.check.probing:disk", (ANSWER, FOLDER), environment, log)
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.memory.free import free_memory_bytes

_MIB = 1 << 20
_PIECE_BYTES, _DISK_BYTES, _DISK_S = 32 * _MIB, 256 * _MIB, 4.0
_NUM_APPENDS, _NUM_FLUSHES, _FLUSHES_S = 1000, 20, 2.0
_MEMORY_PIECE_BYTES = 256 * _MIB
_LEFT_BYTES = 256 * _MIB
"""So much of free memory is left to whoever else needs some meanwhile."""
_SENT_BYTES = {"gloo": 16 * _MIB, "nccl": 256 * _MIB}
_ROUNDS = 3
_SIDE = 4096
_JOIN_S = 60.0


def disk() -> None:
    """FOLDER: bytes a second that are written and flushed, seconds of a small flush and of an append."""
    folder = sys.argv[2]
    piece = os.urandom(_PIECE_BYTES)  # what a disk cannot make smaller
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, begun = 0, time.perf_counter()
        while written < _DISK_BYTES and time.perf_counter() - begun < _DISK_S:
            written += file.write(piece)
            os.fsync(file.fileno())
        rate = written / (time.perf_counter() - begun)
        appends = [_timed(lambda: file.write(piece[:64])) for _ in range(_NUM_APPENDS)]
        flushes, begun = list[float](), time.perf_counter()
        while len(flushes) < _NUM_FLUSHES and time.perf_counter() - begun < _FLUSHES_S:
            file.write(piece[:4096])
            flushes.append(_timed(lambda: os.fsync(file.fileno())))
    _answer(bytes_s=rate, append_s=statistics.quantiles(appends, n=100)[98], flush_s=statistics.median(flushes))


def memory() -> None:
    """BYTES: how much of it could be had as shared memory, with all pages there, and in which time."""
    wanted = int(sys.argv[2])
    with contextlib.suppress(OSError):  # where memory ends after all, this is what the kernel is to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    fd, made, begun = os.memfd_create("rondo-probe", os.MFD_CLOEXEC), 0, time.perf_counter()
    while made < wanted:
        piece = min(_MEMORY_PIECE_BYTES, wanted - made)
        if free_memory_bytes()[0] < piece + _LEFT_BYTES:
            break
        os.posix_fallocate(fd, made, piece)
        made += piece
    _answer(bytes=made, seconds=time.perf_counter() - begun)


def devices() -> None:
    """NUMBER: of each device whether two equal products are equal, what two kinds of copies take, and free memory."""
    import torch

    number, found = int(sys.argv[2]), list[dict[str, Any]]()
    for device in (torch.device("cuda", at) for at in range(min(number, torch.cuda.device_count()))):
        factor = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
        there = factor.to(device)
        free, whole = torch.cuda.mem_get_info(device)
        pinned = torch.empty(256 * _MIB, dtype=torch.uint8).pin_memory()

        def copied(pinned: Any = pinned, device: Any = device) -> None:
            pinned.to(device)
            torch.cuda.synchronize(device)

        copied()
        first, second = there @ there, there @ there
        near = torch.allclose(first[:8].cpu(), factor[:8] @ factor, rtol=1e-2, atol=1e-1)
        found.append({
            "name": torch.cuda.get_device_name(device), "equal": bool(torch.equal(first, second)) and near,
            "bytes_s": pinned.numel() / _timed(copied), "free": free, "bytes": whole,
        })  # fmt: skip
    _answer(devices=found)


def bandwidth() -> None:
    """BACKEND, RANK, SIZE, PORT of the store, and its socket, which rank 0 serves: bytes a second between each pair
    that this rank is the first of, both ways, and of a broadcast to all, where it is rank 0."""
    backend, (rank, size, port, listens) = sys.argv[2], map(int, sys.argv[3:7])
    import torch
    from torch.distributed import TCPStore

    from rondo.comm.groups.communicators import open_group
    from rondo.comm.groups.epochs import Epoch, GroupSpec, Life

    here = "127.0.0.1"
    store = TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=listens) if not rank else None
    members = [Life("probe", at, 1) for at in range(size)]
    spec = GroupSpec("probe", tuple(each.member for each in members), backend, timeout_s=_JOIN_S)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    sent = torch.zeros(_SENT_BYTES[backend], dtype=torch.uint8, device=device)
    epoch, me = Epoch("probe", 1, tuple(members)), members[rank].member
    group = open_group(spec, epoch, me, (here, port), device=device, deadline_s=_JOIN_S)
    pairs = dict[str, float]()
    for first in range(size):
        for second in range(first + 1, size):
            seconds = list[float]()
            for _ in range(_ROUNDS):
                group.barrier()
                begun = time.perf_counter()
                if rank == first:
                    group.send(sent, second)
                    group.recv(sent, second)
                elif rank == second:
                    group.recv(sent, first)
                    group.send(sent, first)
                seconds.append(time.perf_counter() - begun)
            if rank == first:
                pairs[f"{first}-{second}"] = 2 * sent.numel() / min(seconds)
    seconds = []
    for _ in range(_ROUNDS):
        group.barrier()
        begun = time.perf_counter()
        group.broadcast(sent, 0)
        group.barrier()
        seconds.append(time.perf_counter() - begun)
    _answer(pairs=pairs, broadcast_s=sent.numel() / min(seconds))
    group.barrier()
    del store
    os._exit(0)  # the last to leave waits for nobody


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _answer(**found: Any) -> None:
    Path(sys.argv[1]).write_bytes(orjson.dumps(found))
