"""Cgroup: a control group for all that a run starts, where the kernel lets this process make one.

Owns the group's folder. What is in it stays in it, whatever it does to its session, its parent or its environment, also when
every process above it was killed: who sweeps behind a run ends it by the group. Does not own who is in: the guard puts what it
starts into the group that RONDO_CGROUP names (`guard.py`), and whatever that starts follows. Version 2 alone, with `cgroup.kill`
(Linux 5.14); in many containers nobody may make one, and then there is none.

    group = Cgroup.make("rondo-1a2b3c4d")           # None where it cannot be made
    group.end(deadline_s=15)                        # SIGKILL for all of them; True once none is left
    group.remove()

Its maker keeps its folder locked; one that nobody has locked is left over from a run that was killed together with who sweeps
behind it, and goes when the next group is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

PROCS = "cgroup.procs"
_NAMES = "rondo-????????"
"""As run-time directories are named."""
_PAUSE_S = 0.01
_LOCKS: dict[Path, int] = {}


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One group, by its folder."""

    path: Path

    @classmethod
    def make(cls, name: str) -> Cgroup | None:
        """A new group below that of this process, which does not enter it."""
        own = _own()
        if own is None:
            return None
        sweep(own)
        group = cls(own / name)
        try:
            group.path.mkdir()
            lock(group.path, fcntl.LOCK_SH)
        except OSError:  # not ours to make: another user's, or read-only
            return None
        if (group.path / "cgroup.kill").exists():
            return group
        group.remove()
        return None

    def add(self, pid: int) -> None:
        """This process, and what it starts from now on. One that is gone is passed over, as is one that may not move."""
        with contextlib.suppress(OSError):
            (self.path / PROCS).write_text(str(pid))

    def end(self, deadline_s: float) -> bool:
        """Blocks until nothing in it lives. False when something would not die."""
        until = time.monotonic() + deadline_s
        with contextlib.suppress(FileNotFoundError):  # removed: nothing was in it
            while "populated 1" in (self.path / "cgroup.events").read_text():
                if time.monotonic() > until:
                    return False
                (self.path / "cgroup.kill").write_text("1")
                time.sleep(_PAUSE_S)
        return True

    def remove(self) -> None:
        """Of an empty group. Safe to call twice."""
        with contextlib.suppress(OSError):
            self.path.rmdir()
        if self.path in _LOCKS:
            os.close(_LOCKS.pop(self.path))


def lock(path: Path, how: int) -> None:
    """Locks a group's folder until it is removed, or this process ends. OSError where it is gone, or locked otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        path.stat()  # it may have gone before it was locked
    except OSError:
        os.close(fd)
        raise
    _LOCKS[path] = fd


def sweep(above: Path) -> None:
    """Takes away groups of runs that are over, in which nothing is."""
    for path in above.glob(_NAMES):
        with contextlib.suppress(OSError):
            lock(path, fcntl.LOCK_EX)
            Cgroup(path).remove()


def _own() -> Path | None:
    """The folder of this process's group of version 2."""
    mine = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        root, mount = fields.split()[3:5]
        if kind.startswith("cgroup2 ") and mine and Path(mine[0]).is_relative_to(root):
            return Path(mount) / Path(mine[0]).relative_to(root)
    return None
