"""Pace: how long a computation may take, judged by how long it took before.

Owns the limit, and the section under which the supervisor sees a computation. Does not own the computation or what happens past
the limit (`supervision.py`). A computation that hangs outside the interpreter, in a kernel or a collective, lets the event loop
beat on; its section is what shows it.

    work = Work(heartbeat, "train", SupervisionConfig())
    with work: trainer.accumulate(...)          # on any thread; its limit: ten times the longest so far

Invariant: a section is open exactly while something is computed under its name. Of several at once it is the time in which none
of them ends, so that a queue in front of them counts for nothing; who waits idly has no section.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.supervision.heartbeat import HeartbeatWriter


def limit_s(limits: SupervisionConfig, longest_s: float | None) -> float:
    """Seconds for a computation that follows those of which the longest took `longest_s`; None: there was none."""
    if longest_s is None:
        return limits.work_ceiling_s
    return min(limits.work_ceiling_s, max(limits.work_floor_s, limits.work_factor * longest_s))


class Work:
    """The computations of one name in one process. `at_least_s`: a limit that they have of their own, and may reach while nothing
    else moves."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        name: str,
        limits: SupervisionConfig,
        at_least_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat, self._name, self._limits, self._at_least_s = heartbeat, name, limits, at_least_s
        self._clock = clock
        self._lock = threading.Lock()
        self._longest_s: float | None = None
        self._num = 0
        self._since = 0.0
        self._section: AbstractContextManager[None]

    def moved(self) -> None:
        """A part of what is computed has ended, and the next begins: each of them has the limit."""
        with self._lock:
            self._close()
            self._open()

    def __enter__(self) -> None:
        with self._lock:
            self._num += 1
            if self._num == 1:
                self._open()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._close()
            self._num -= 1
            if self._num:
                self._open()

    def _open(self) -> None:
        self._since = self._clock()
        allowed_s = max(limit_s(self._limits, self._longest_s), self._at_least_s)
        self._section = self._heartbeat.section(self._name, allowed_s, silent=False, patient=self._at_least_s > 0)
        self._section.__enter__()

    def _close(self) -> None:
        self._section.__exit__(None, None, None)
        self._longest_s = max(self._longest_s or 0.0, self._clock() - self._since)
