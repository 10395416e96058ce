"""Subreaper: the process above one that runs a user's code, so that whatever that starts ends with it.

    pool -> subreaper -> worker -> whatever the function starts, in groups and sessions of its own perhaps

Owns one promise: when the worker has ended, when whoever started this process has ended, or when it is sent `END`, all that is
below it is killed, and then it ends as the worker did. Whatever leaves its session or its parent stays below a subreaper
(`process.py`). Does not own when a worker is to end. A subreaper that is killed takes its worker with it, and leaves the
others to the next one above, a role group's root.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from rondo.runtime.processes.guard import PARENT_DIED, die_with_parent
from rondo.runtime.processes.process import end_below, set_child_subreaper
from rondo.runtime.supervision.proxy import end_as

END = PARENT_DIED


def keep(parent: int, descriptors: Sequence[int]) -> None:
    """Forks the worker, in which alone this returns, in a process group of its own; the caller becomes its subreaper.

    `parent` is the pid of who started the caller; `descriptors` are the worker's, of which the subreaper closes its copies.
    """
    worker: int | None = None

    def end(*_: object) -> None:
        signal.signal(END, signal.SIG_IGN)
        end_below()
        end_as(os.waitpid(worker, 0)[1] if worker is not None else signal.SIGKILL)

    me = os.getpid()
    set_child_subreaper()
    signal.signal(END, end)
    die_with_parent(parent, END)
    worker = os.fork()
    if worker == 0:
        signal.signal(END, signal.SIG_DFL)
        die_with_parent(me)
        os.setpgid(0, 0)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    while True:
        # Left to be collected: where `END` comes in between, its handler needs the worker's status.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid == worker:
            end()
        elif ended is not None:
            os.waitpid(ended.si_pid, 0)
