"""Shared memory for tests: real memfds, mapped by this process and by children that get the descriptor."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import RingTail, RingView, RingWriter, ring_bytes

ROOT = Path(__file__).parents[2]


class MemorySegment:
    """A segment as the ring needs it. `fd` goes to a child, which opens the same memory with
    `MemorySegment(fd=...)`."""

    def __init__(self, num_bytes: int = 0, *, fd: int | None = None, name: str = "test") -> None:
        if fd is None:
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            fd = os.dup(fd)
        self.name = name
        self.fd = fd
        self.num_bytes = os.fstat(fd).st_size
        self._writable = mmap.mmap(fd, self.num_bytes)
        self._readonly = mmap.mmap(fd, self.num_bytes, prot=mmap.PROT_READ)
        weakref.finalize(self, os.close, fd)

    def view(self, readonly: bool = False) -> memoryview:
        return memoryview(self._readonly if readonly else self._writable)

    def close(self) -> None:
        """Raises BufferError while anyone holds a view."""
        self._writable.close()
        self._readonly.close()


class TestRing:
    """A ring with its three sides in one process; `capacity` bytes of records."""

    __test__ = False

    def __init__(self, capacity: int, doorbell_fd: int | None = None) -> None:
        self.segment = MemorySegment(ring_bytes(capacity))
        self.writer = RingWriter(self.segment, doorbell_fd, "ring/test")
        self.tail = RingTail(self.segment, "ring/test")
        self.view = RingView(self.segment, "ring/test")


def tokens(*lengths: int, first: int = 0) -> Column:
    """An int32 column with one row a length; its values count on from `first`."""
    arrays = []
    for length in lengths:
        arrays.append(np.arange(first, first + length, dtype=np.int32))
        first += length
    return Column("tokens", "int32", arrays)


def start_child(function: str, *args: Any, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Run `function` ("module:name") in a fresh interpreter; ints and strings are passed on, `fds` are inherited."""
    module, name = function.split(":")
    call = f"from {module} import {name}; {name}(*{args!r})"
    return subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, pass_fds=fds, stdout=subprocess.PIPE)
