"""Incarnation: the processes of one life of a role group or service, as the supervisor holds them.

Owns the watch over them, their signals, usage, and the proof that all of them are gone. Does not own what an exit means: it
reports exits to its `Watcher`. Invariant: after `end()` no process of this life exists, whatever it had started, or its deadline
has passed and DeadlineExceeded names it.

    main      the root of a role group, or the service itself: our child; its exit code is collected here
    worker    registered by itself; below the root
    others    what workers started: below the root too, which is a subreaper, whatever they did to their session or environment
    strays    what was below a root that was killed by somebody else: with us, and of no living life
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rondo.runtime.memory.segments import Registration, Segment
from rondo.runtime.processes import process
from rondo.runtime.supervision.heartbeat import Beat, ask_to_leave, read_beats
from rondo.runtime.supervision.nursery import Forked
from rondo.runtime.waits import waiting

_END_S = 60.0
"""A process in an uninterruptible wait of a driver may take its time to die."""
_DUMP_S = 0.5


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and processor time of all living processes of an incarnation."""

    rss_bytes: int
    cpu_s: float


Main = subprocess.Popen[bytes] | Forked


class Watcher(Protocol):
    """Who is told of exits, and knows of strays. `code` as Python gives it, None when somebody else collected it unseen."""

    def strays(self) -> list[process.Stat]: ...

    def short_of(self, error: OSError) -> None: ...

    def worker_exited(self, life: Incarnation, worker: Registration, code: int | None) -> None: ...

    def main_exited(self, life: Incarnation, code: int) -> None: ...


class Incarnation:
    """One life. It is given its main process when that has been started."""

    def __init__(
        self,
        name: str,
        number: int,
        log: Path,
        watcher: Watcher,
    ) -> None:
        self.name = name
        self.number = number
        self.main: Main | None = None
        self.starting: asyncio.Task[None] | None = None
        """The task that starts its main process, where that takes time."""
        self.log = log
        self.workers: dict[int, Registration] = {}
        self.ending: asyncio.Task[None] | None = None
        """The task that ends it, once there is one."""
        self.heartbeat: Segment | None = None
        self._watcher = watcher
        self._cpu_ticks: dict[int, int] = {}
        self._watches: list[Callable[[], None]] = []

    def begin(self, main: Main) -> None:
        """Its main process is there."""
        self.main = main
        self._watches.append(process.when_over(main.pid, lambda: self._watcher.main_exited(self, main.wait())))

    def add(self, worker: Registration) -> None:
        """A worker names itself. ProcessLookupError for one that is gone."""
        self._watches.append(
            process.when_over(worker.pid, lambda: self._watcher.worker_exited(self, worker, self._exit_code(worker)))
        )
        self.workers[worker.rank] = worker

    def beats(self) -> tuple[Beat, ...]:
        """The heartbeats of its ranks; empty once it is closed."""
        return read_beats(self.heartbeat.view(readonly=True)) if self.heartbeat is not None else ()

    @property
    def pids(self) -> tuple[int, ...]:
        """Its workers, by rank; a service's only process."""
        return tuple(self.workers[rank].pid for rank in sorted(self.workers)) or self._main_pids

    @property
    def own_pids(self) -> tuple[int, ...]:
        """Whose exits are collected here, or seen before they are collected."""
        return (*self._main_pids, *(worker.pid for worker in self.workers.values() if self._watches))

    def usage(self) -> Usage:
        """What it uses now. Processor time counts processes that are gone, as far as they were seen. A root's memory is the
        nursery's."""
        rss_bytes = 0
        for pid in {*self._main_pids, *self.pids}:
            found = process.stat(pid)
            if found is not None and found.alive:
                rss_bytes += found.rss_bytes if pid in self.pids else 0
                self._cpu_ticks[pid] = found.cpu_ticks
        return Usage(rss_bytes, sum(self._cpu_ticks.values()) / process.TICKS_PER_S)

    def signal(self, number: int) -> None:
        """To its workers, not to torchrun, which would pass it on with rules of its own; to a service itself."""
        if self.workers:
            for worker in self.workers.values():
                process.kill(worker.pid, worker.start_time, number)
        elif self.main is not None and self.main.poll() is None:
            self.main.send_signal(number)

    def ask_to_leave(self) -> None:
        """Save and leave."""
        if self.heartbeat is not None:
            ask_to_leave(self.heartbeat.view())
        self.signal(signal.SIGTERM)

    async def dump(self) -> None:
        """Workers write the stacks of all their threads to the log; those that are stopped cannot."""
        if self.workers:  # others have no handler: the signal would end them
            try:
                self.signal(signal.SIGUSR2)
            except OSError as error:  # no descriptor to signal with: it ends without stacks
                self._watcher.short_of(error)
            await asyncio.sleep(_DUMP_S)

    async def end(self) -> None:
        """SIGKILLs all its processes until none is left."""
        async with waiting("end of processes", peer=f"{self.name}.{self.number}", deadline_s=_END_S):
            if self.starting is not None:
                self.starting.cancel()
                await asyncio.wait([self.starting])
            pause_s = 0.005
            while True:
                gone = self.main is None or self.main.poll() is not None
                try:
                    if not self._kill_once() and gone:
                        break
                except OSError as error:  # no descriptor to look with: what is below the main process dies with it
                    self._watcher.short_of(error)
                    if self.main is None and not self.workers:
                        break  # it never had a process
                    if not gone and self.main is not None:
                        self.main.send_signal(signal.SIGKILL)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)
        self.close()

    def _kill_once(self) -> int:
        """What is below the main process, which follows when that is dead; then strays."""
        num_left = 0
        if self.main is not None and self.main.poll() is None:
            num_left = process.kill_below(self.main.pid)
            if not num_left:
                self.main.send_signal(signal.SIGKILL)
        for stray in self._watcher.strays():
            if stray.alive:
                num_left += 1 + process.kill_below(stray.pid)
                process.kill(stray.pid, stray.start_time)
        return num_left

    def close(self) -> None:
        """Stops watching. Safe to call twice."""
        if self.heartbeat is not None:
            self.heartbeat.close()
            self.heartbeat = None
        for stop in self._watches:
            stop()
        self._watches.clear()

    @property
    def _main_pids(self) -> tuple[int, ...]:
        return () if self.main is None else (self.main.pid,)

    def _exit_code(self, worker: Registration) -> int | None:
        with contextlib.suppress(OSError):  # no descriptor to look with: its main process tells how it ended
            found = process.stat(worker.pid)
            if found is not None and found.start_time == worker.start_time and not found.alive:
                return process.exit_code(found.exit_status)
        left = any(beat.left for beat in self.beats() if beat.rank == worker.rank)
        return 0 if left else None  # torchrun was quicker and collected it
