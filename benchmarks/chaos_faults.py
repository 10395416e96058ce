"""Faults that a process of a run has when it is signalled: an exception, a hang in C code, memory without end.

Owns what a signal makes a process do; not who is signalled when (`chaos_run.py`). Nothing in rondo knows of it: processes come by
it as by any code of a user's, through `PYTHONPATH` (`chaos_site/sitecustomize.py`, for all that Python starts) and through
settings that name role classes (`chaos_roles.py`, for what computes on a thread of its own). Standard library only.

    RAISE   an exception: out of what the process waits for where it has an event loop, else out of whatever it does
    HANG    pause(2), for ever, without the interpreter's lock: as a kernel or a collective that does not come back
    EAT     memory, page by page, until the kernel (or its own limit) has an end of it
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
from typing import Any

RAISE, HANG, EAT = (signal.SIGRTMIN + offset for offset in (4, 5, 6))
_PIECE_BYTES = 4 << 20


def strike(number: int) -> None:
    """Has the fault, here and now."""
    if number == RAISE:
        raise RuntimeError("a fault on purpose")
    if number == HANG:
        pause = ctypes.CDLL(None).pause
        while True:
            pause()
    held = []
    while True:
        held.append(b"\1" * _PIECE_BYTES)


def install() -> None:
    """In this process, and in what is forked of it."""
    for number in (RAISE, HANG, EAT):
        signal.signal(number, _on_signal)


def _number(task: asyncio.Task[Any]) -> float:
    """In the order of their making; those with a name of their own last."""
    _, _, number = task.get_name().partition("Task-")
    return int(number) if number.isdecimal() else float("inf")


def _on_signal(number: int, frame: object) -> None:
    loop = asyncio._get_running_loop()
    if number != RAISE or loop is None:
        strike(number)
        return
    first: Any = min(asyncio.all_tasks(loop), key=_number)
    loop.call_soon_threadsafe(first._fut_waiter.set_exception, RuntimeError("a fault on purpose"))
