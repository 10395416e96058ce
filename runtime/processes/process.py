"""Processes as the kernel shows them: identity, descent, and killing with proof.

Owns the reading of /proc and the signals that must not miss. Does not own who is to be killed: `supervisor.py` does.

Invariants: a pid alone names nobody, since pids come back. A process is (pid, start time); a signal goes through a pidfd
that was opened before the identity was checked. Proof of death goes by descent: below a subreaper stays whatever leaves its
session, its parent or its environment. All but `processes`, `scan` and `kill_session` cost by
what they are asked for, not by the machine.

    while kill_below(root):                                 # until nothing that `root`, a subreaper, ever started is alive
        time.sleep(0.01)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rondo.runtime.processes.guard import die_with_parent as die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_DEAD = ("Z", "X")
_PAUSE_S = 0.005

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


def children(pid: int) -> list[Stat]:
    """The children of a process, zombies too; none where there is no such process.

    Who dies leaves its children to a subreaper before it shows as dead: a list that was read before is read again, so that what
    a child left to `pid` stands beside its zombie.
    """
    dead: set[int] = set()
    while True:
        listed = _listed_children(pid)
        found = [child for child in map(stat, listed) if child is not None]
        died = set(listed) - {child.pid for child in found if child.alive} - dead
        if not died:
            return [child for child in found if child.parent == pid]
        dead |= died


def _listed_children(pid: int) -> list[int]:
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())  # each thread has those that it started
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return [] if _SHOWS_CHILDREN else [child.pid for child in processes() if child.parent == pid]


_SHOWS_CHILDREN = (_PROC / "self" / "task" / str(os.getpid()) / "children").exists()
"""A kernel may be built without."""


def below(pid: int) -> list[Stat]:
    """Every living process below this one, parents before what they started."""
    found, above = [], [pid]
    for parent in above:
        living = [child for child in children(parent) if child.alive]
        found += living
        above += [child.pid for child in living]
    return found


def private_bytes(pid: int) -> int:
    """Memory that a process and all below it share with nobody; 0 for one that is gone."""
    return sum(_mapped_bytes(number, "Private_") or 0 for number in (pid, *(process.pid for process in below(pid))))


def memory_bytes(found: Iterable[Stat]) -> int:
    """Return the memory of processes together, a page that several map counted once (PSS). A process that hides its pages counts
    with its RSS."""
    return sum(process.rss_bytes if (own := _mapped_bytes(process.pid, "Pss:")) is None else own for process in found)


def _mapped_bytes(pid: int, kind: str) -> int | None:
    """The pages of a process that the kernel lists under `kind`, in bytes; None where it does not show them."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def kill_below(pid: int) -> int:
    """SIGKILLs every living process below this one, once, and returns how many there were. What dies leaves what it started to
    the next subreaper above: below a subreaper, nothing is alive once this has returned 0."""
    found = below(pid)
    for process in found:
        kill(process.pid, process.start_time)
    return len(found)


def end_below() -> None:
    """SIGKILLs everything below this process, a subreaper, until all of it is dead, which may take as long as the kernel holds
    one of them."""
    while kill_below(os.getpid()):
        time.sleep(_PAUSE_S)


def scan(markers: Set[bytes]) -> list[Stat]:
    """Living processes whose environment, as they were started with it, holds every one of `markers` (b"NAME=value"). A program
    may wipe its own: this is no proof. This process is never among them."""
    return [
        process
        for process in processes()
        if process.pid != os.getpid() and process.alive and markers <= _environment(process.pid)
    ]


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


def end_all(find: Callable[[], Sequence[Stat]], deadline_s: float) -> Sequence[Stat]:
    """SIGKILLs what `find` finds, and all below it, until it finds nothing. Blocks; returns what would not die in `deadline_s`.

    Leaves first: a subreaper goes when nothing is left below it. In the second half of the time whoever goes on starting
    others does not wait for them.
    """
    begun = time.monotonic()
    while (left := find()) and (spent_s := time.monotonic() - begun) < deadline_s:
        for found in left:
            if kill_below(found.pid) == 0 or spent_s > deadline_s / 2:
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


def orphans(own: Set[int]) -> list[Stat]:
    """What came to this process as subreaper: children, zombies too, that are not its `own` and not of its own session."""
    return [child for child in children(os.getpid()) if child.pid not in own and child.session != os.getsid(0)]


def when_over(pid: int, then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` on this event loop, once, when the process has ended. What it returns ends the watch, at any time.
    ProcessLookupError for a process that was collected already."""
    import asyncio  # for who has a loop: janitors and subreapers start without it

    loop, watched = asyncio.get_running_loop(), [os.pidfd_open(pid)]

    def stop() -> None:
        if watched:
            loop.remove_reader(watched[0])
            os.close(watched.pop())

    def ended() -> None:
        stop()
        then()

    loop.add_reader(watched[0], ended)
    return stop


async def over(pid: int) -> None:
    """Waits until the process has ended, however long it takes. ProcessLookupError as of `when_over`."""
    import asyncio

    ended = asyncio.Event()
    stop = when_over(pid, ended.set)
    try:
        await ended.wait()
    finally:
        stop()


def reap(children: Iterable[Stat]) -> int:
    """Collects the zombies among children, and returns how many there were."""
    num_reaped = 0
    for process in children:
        if not process.alive:
            with contextlib.suppress(ChildProcessError):  # collected meanwhile
                num_reaped += os.waitpid(process.pid, os.WNOHANG)[0] != 0
    return num_reaped


def _environment(pid: int) -> frozenset[bytes]:
    try:
        return frozenset((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return frozenset()  # gone, or another user's: not ours
