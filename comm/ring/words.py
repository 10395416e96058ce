"""Control words and doorbells: the only code that touches memory which two processes use at the same time.

Owns the two primitives under the ring, the slab and the snapshot: an aligned uint64 in a cache line of its own, and an
eventfd that says "look again". It does not own what a word means, nor the memory (`runtime/memory/segments.py`).

Invariant: a word has one writer. A load gives a value that was stored whole, never half of one: CPython's memoryview
copies an aligned native `Q` with one 8-byte `memcpy`, which compilers turn into a single move (`litmus.py` checks it).

The protocol, and why there is no "the reader sleeps" flag: a processor may let a load pass an earlier store, so
store-head-then-load-flag loses wake-ups, from Python too. A system call on both sides does not:

    producer                              consumer
    payload, descriptor                   wait until the doorbell is readable
    words.store(HEAD, ...)                drain(doorbell)            first
    ring_doorbell(fd)        always       words.load(HEAD), read     after

A doorbell that rings between `drain` and `load` costs one look in vain; none is ever lost. A producer that dies between
its store and its doorbell has put the record all the same: whoever learns of the death looks at the head once more.

Order of memory: x86-64 keeps stores in order and loads in order, so there (`PEEK_IS_SAFE`) a reader may look at a head
without draining first and finds the payload complete. Elsewhere the eventfd's lock orders the stores of what has rung before the
loads of who drained it, and of nothing else: not of a record whose head is there and whose doorbell is not. So there

    look only after a `drain` that returned more than 0        but once more after a death, and at a consumer's own start
    words.load(HEAD), then `settle`, then read up to that head and no further

`settle` is membarrier(2): every processor that runs a producer (`be_settled`) passes a full barrier, so what was stored before
the head that was seen is there.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

import numpy as np

LINE_BYTES = 64
"""Size of a cache line: the distance between two words."""

PEEK_IS_SAFE = platform.machine() in ("x86_64", "AMD64")
"""Whether a head may be looked at without draining its doorbell first."""

_NR_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365}.get(platform.machine())
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2


class Words:
    """`count` uint64 words at `offset` bytes of `view`, one a cache line.

    Memory that nobody has written reads as 0. Raises ValueError when the words do not lie whole and aligned inside the
    view.
    """

    __slots__ = ("_words", "count")

    def __init__(self, view: memoryview, offset: int, count: int) -> None:
        end = offset + count * LINE_BYTES
        if offset < 0 or count < 1 or end > view.nbytes:
            raise ValueError(f"words must lie inside their segment, got bytes {offset} to {end} of {view.nbytes}.")
        if (np.frombuffer(view, np.uint8).ctypes.data + offset) % LINE_BYTES:
            raise ValueError(f"words must start at a multiple of {LINE_BYTES} bytes, got offset {offset}.")
        self.count = count
        self._words = view[offset:end].cast("Q")

    def load(self, index: int) -> int:
        return self._words[index << 3]

    def store(self, index: int, value: int) -> None:
        """Raises TypeError on a read-only view, ValueError when `value` is outside 0 to 2**64 - 1."""
        self._words[index << 3] = value


def settle() -> None:
    """Between a head and what is read below it: the stores of its producer before it are there. Nothing where `PEEK_IS_SAFE`; a
    kernel without the call leaves a record open to be seen early between its head and its doorbell."""
    if not PEEK_IS_SAFE:
        membarrier(_GLOBAL_EXPEDITED)


@cache
def be_settled() -> None:
    """To be called by a process before its first store of a head: `settle` reaches it from then on."""
    if not PEEK_IS_SAFE:
        membarrier(_REGISTER_GLOBAL_EXPEDITED)


def membarrier(command: int) -> bool:
    """Whether the kernel has done it; microseconds."""
    return _NR_MEMBARRIER is not None and ctypes.CDLL(None).syscall(_NR_MEMBARRIER, command, 0, 0) == 0


def new_doorbell() -> int:
    """A doorbell as every user of one expects it: an eventfd that never blocks and is closed in children."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def ring_doorbell(fd: int) -> None:
    """Wake whoever waits on the doorbell. To be called after every store of a head, without exception."""
    try:
        os.eventfd_write(fd, 1)
    except BlockingIOError:
        return  # the counter is at its maximum: the doorbell is ringing already


def drain(fd: int) -> int:
    """Silence the doorbell and return how often it rang since the last drain (0 when it did not).

    To be called before the head is loaded, never after: a ring that is drained after the load is a lost wake-up. `fd`
    must be non-blocking (`new_doorbell`), else a quiet doorbell blocks the caller.
    """
    try:
        return os.eventfd_read(fd)
    except BlockingIOError:
        return 0
