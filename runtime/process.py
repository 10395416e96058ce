"""Processes as the kernel shows them: identity, sessions, what a run has left, and killing with proof.

Owns the reading of /proc and the signals that must not miss. Does not own who is to be killed: `supervisor.py` does.

Invariant: a pid alone names nobody, since pids come back. A process is (pid, start time); a signal goes through a pidfd
that was opened before the identity was checked.

    for found in scan({b"RONDO_RT_DIR=/tmp/rondo-x1"}):     # every process of one run, however it was started
        kill(found.pid, found.start_time)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from rondo.runtime.guard import die_with_parent as die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_DEAD = ("Z", "X")

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stat:
    """One process. Start and processor time in clock ticks; `exit_status` as wait(2) gives it, 0 while it lives."""

    pid: int
    state: str
    parent: int
    session: int
    cpu_ticks: int
    start_time: int
    rss_bytes: int
    exit_status: int

    @property
    def alive(self) -> bool:
        """False for a zombie: its memory is released, only its exit status is left."""
        return self.state not in _DEAD


def stat(pid: int) -> Stat | None:
    """The process with this pid, also a zombie; None when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets and may hold brackets and spaces itself; fields are counted behind the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_time=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
        exit_status=int(fields[49]),
    )


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; with the pid it names a process for ever."""
    found = stat(pid)
    if found is None:
        raise ProcessLookupError(f"pid {pid} must be alive to have a start time, got no such process")
    return found.start_time


def processes() -> Iterator[Stat]:
    """Every process that this one can see."""
    for entry in os.scandir(_PROC):
        if entry.name.isdecimal():
            found = stat(int(entry.name))
            if found is not None:
                yield found


def scan(markers: Set[bytes], sessions: Set[int] = frozenset()) -> list[Stat]:
    """Living processes whose environment holds every one of `markers` (b"NAME=value"), or that belong to `sessions`.

    The environment is what a process was started with, inherited by all it starts: nothing that a run starts can hide
    by leaving its session or its parent. This process is never among them.
    """
    found = []
    for process in processes():
        if process.pid == os.getpid() or not process.alive:
            continue
        if process.session in sessions or markers <= _environment(process.pid):
            found.append(process)
    return found


def kill(pid: int, start_time: int, number: int = signal.SIGKILL) -> bool:
    """Signals this very process. False when it is gone, or when its pid belongs to another one by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        found = stat(pid)
        if found is None or found.start_time != start_time:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def kill_session(session: int) -> int:
    """SIGKILLs every process of a session, stopped ones too, and returns how many there were.

    The kernel gives a session's number to nobody else while a member lives, so no stranger is hit.
    """
    if session == os.getsid(0):
        raise ValueError(f"session must not be this process's own, got {session}")
    members = [found for found in processes() if found.session == session and found.alive]
    return sum(kill(member.pid, member.start_time) for member in members)


def end_all(markers: Set[bytes], deadline_s: float, sessions: Set[int] = frozenset()) -> list[Stat]:
    """SIGKILLs what `scan` finds until it finds nothing. Blocks; returns what would not die within `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while (left := scan(markers, sessions)) and time.monotonic() < deadline:
        for found in left:
            kill(found.pid, found.start_time)
        time.sleep(0.01)  # dying takes the kernel a moment, and tells nobody but the parent
    return left


def exit_code(status: int) -> int:
    """A wait status as Python shows it: 3 for exit(3), -9 for SIGKILL."""
    return os.waitstatus_to_exitcode(status & 0xFFFF)


def exit_text(code: int | None) -> str:
    """How a process ended, for people."""
    if code is None:
        return "ended without a word"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def set_child_subreaper() -> None:
    """From now on, orphans below this process become its children, so that it can see and end them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def reap_orphans(own: Set[int]) -> int:
    """Collects the zombies that came to this process as subreaper; `own` are pids whose exit somebody else collects. Costs one
    system call where no child has ended."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return 0
    except ChildProcessError:
        return 0
    num_reaped = 0
    for process in processes():
        if process.parent == os.getpid() and not process.alive and process.pid not in own:
            with contextlib.suppress(ChildProcessError):  # collected meanwhile
                num_reaped += os.waitpid(process.pid, os.WNOHANG)[0] != 0
    return num_reaped


def _environment(pid: int) -> frozenset[bytes]:
    try:
        return frozenset((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return frozenset()  # gone, or another user's: not ours
