"""Guard: runs a command that cannot outlive its parent.

    python -m rondo.runtime.processes.guard --parent PID [--deaf] -- COMMAND...

Owns the one promise that makes orphans impossible: the kernel sends SIGKILL to this process when its parent dies, also
when the parent is killed itself. The command replaces the guard (`exec`), so pid, descriptors and the promise stay.
Batch systems and service managers signal all processes of a run at once, of which the supervisor alone is meant: with --deaf the
command ignores SIGTERM, SIGHUP and SIGUSR1, as does what it starts, until it says what it does at them.
Where RONDO_CGROUP names a control group, the command and all that it starts are in it (`cgroup.py`).
Does not own grandchildren: each asks for the same with `die_with_parent`, and finds its parent's pid in
RONDO_PARENT_PID, which the guard sets to its own.

Standard library only: the supervisor runs this file by its path, without `site`, which starts it in 15 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PARENT_PID = "RONDO_PARENT_PID"
"""The environment variable in which a process finds the pid that its parent must have."""
CGROUP = "RONDO_CGROUP"
"""The environment variable that names the folder of the run's control group, where it has one."""
PARENT_DIED = signal.SIGPWR
"""What a process that has to end more than itself is sent when its parent dies: nobody sends it to all processes of a run."""

_PR_SET_PDEATHSIG = 1
_USAGE = "usage: python -m rondo.runtime.processes.guard --parent PID [--deaf] -- COMMAND [ARGUMENT...]"


def die_with_parent(parent_pid: int | None = None, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to SIGKILL this process when its parent dies (or to send another signal, for one that has to end
    more than itself); ends it at once if the parent is gone already.

    `parent_pid` is what the parent must be; by default RONDO_PARENT_PID says so, and under no guard nobody checks. The
    kernel means the parent's *thread*: spawn from the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    expected = int(os.environ.get(PARENT_PID, "0")) if parent_pid is None else parent_pid
    # A process that the guard became carries its own pid there; the guard has checked its parent.
    if expected not in (0, os.getpid()) and os.getppid() != expected:
        # The parent died between the fork and the prctl, so no signal will come.
        os.kill(os.getpid(), signal.SIGKILL)


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs a module of rondo, or of another interpreter `python`. With `-P`, since a plain `-m` looks for
    every module in the working directory first: a user's `random.py` there would be loaded as Python's own."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def guarded(command: Sequence[str], *, deaf: bool = False) -> list[str]:
    """`command` below the guard, with this process as parent, to be started from its main thread. By the guard's path and without
    `site`: it needs the standard library only, and starts in a tenth of the time."""
    parent = ("--parent", str(os.getpid()), *["--deaf"] * deaf)
    return [sys.executable, "-I", "-S", __file__, *parent, "--", *command]


def main(arguments: Sequence[str]) -> int:
    """Becomes the command. Returns only when it cannot: 2 for wrong usage, 127 for a command that does not start."""
    deaf = list(arguments[2:3]) == ["--deaf"]
    rest = list(arguments[2 + deaf :])
    if len(rest) < 2 or arguments[0] != "--parent" or not arguments[1].isdecimal() or rest[0] != "--":
        print(_USAGE, file=sys.stderr)
        return 2
    die_with_parent(int(arguments[1]))
    os.environ[PARENT_PID] = str(os.getpid())
    if CGROUP in os.environ:
        with contextlib.suppress(OSError), open(f"{os.environ[CGROUP]}/cgroup.procs", "w") as members:  # noqa: PTH123 - light
            members.write("0")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if deaf else ():
        signal.signal(number, signal.SIG_IGN)
    command = rest[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} must be a program that can run, got {error.strerror}. Check the path", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
