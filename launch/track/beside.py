"""Beside: light processes that tell of a run, started with it, and started again when they die.

Owns their life. Does not own what they do. Each is niced, hears no signal that is meant for the run, and dies with this process;
the end of its stdin says that the run is over. Whatever becomes of one is told in events.jsonl and changes nothing else.

    beside = Beside(run, {"wandb": "rondo.launch.track.follow"}, tell)
    running = asyncio.create_task(beside.run());  ...;  await beside.finish(running, is_stopped)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rondo.runtime.processes import guard
from rondo.runtime.processes.process import end_all, exit_text, over, scan
from rondo.runtime.records.logs import LOGS
from rondo.runtime.records.telling import telling

FOLDER = "trackers"
"""In the run directory: their logs, and what they keep."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
FINISH_S = 60.0
"""Within which all is told once the run is over; `rondo track` goes on with what is not."""
_LOOK_S = 0.2
_KILLED_S = 5.0
"""Within which one that was killed is gone, unless its kernel holds it (a disk that does not answer)."""
_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


class Beside:
    """Of one run: `programs` by name, each a module that takes the run's folder and that name. To be used on the main thread,
    with which what it starts dies."""

    def __init__(
        self, run: Path, programs: Mapping[str, str], tell: Callable[[str, Mapping[str, Any]], None], *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:  # fmt: skip
        self._run, self._programs, self._tell = run.absolute(), programs, tell
        self._first_pause_s = first_pause_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._ending = asyncio.Event()

    def pids(self) -> dict[str, int]:
        """Of those that live."""
        return {name: child.pid for name, child in self._children.items()}

    async def run(self) -> None:
        """Until `finish` has been said and all have ended; cancelled, kills them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, module in self._programs.items():
                    tasks.create_task(self._keep(name, module))
        finally:
            for child in self._children.values():
                self._end(child)

    async def finish(self, running: asyncio.Task[None], is_stopped: Callable[[], bool]) -> None:
        """Lets them tell what is left, until it is late or `is_stopped`."""
        self._ending.set()
        for child in self._children.values():
            self._end_input(child)
        until = time.monotonic() + FINISH_S
        while not running.done() and time.monotonic() < until and not is_stopped():
            await asyncio.wait([running], timeout=_LOOK_S)
        if running.cancel():
            self._tell("tracker_cut_off", {"trackers": sorted(self._children)})
            await asyncio.wait([running])

    async def _keep(self, name: str, module: str) -> None:
        pause_s = self._first_pause_s
        while True:
            began, is_last = time.monotonic(), self._ending.is_set()
            with telling(f"tracker {name}"):
                code = await self._once(name, module)
                if code == 0 and self._ending.is_set():
                    return
                why = _CREDENTIALS.sub("...@", "".join(LOGS.last_lines(self._log(name), 1))) or "said nothing"
                self._tell("tracker_died", {"tracker": name, "how": exit_text(code), "why": why, "again_in_s": pause_s})
            if is_last:
                return
            with contextlib.suppress(TimeoutError):  # who is dead when the run ends lives once more, for what is left
                await asyncio.wait_for(self._ending.wait(), pause_s)
            lasted = time.monotonic() - began > _LONGEST_PAUSE_S
            pause_s = self._first_pause_s if lasted else min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _once(self, name: str, module: str) -> int:
        """One life; its exit code."""
        child = self._children[name] = self._start(name, module)
        if self._ending.is_set():
            self._end_input(child)
        await over(child.pid)
        del self._children[name]
        return self._end(child)

    def _start(self, name: str, module: str) -> subprocess.Popen[bytes]:
        """In this process's session, so that nobody takes it for one that the run left behind, and in a process group of its own,
        which a Ctrl-C does not reach."""
        command = guard.guarded(guard.module_command(module, str(self._run), name), deaf=True)
        with LOGS.open(self._log(name)) as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        """Also of what it started, in sessions of their own too, which has from the guard a number that nobody else gets until
        it is waited for. Nobody waits for one that cannot die."""
        self._end_input(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        marker = f"{guard.PARENT_PID}={child.pid}".encode()
        end_all(lambda: scan({marker}), _KILLED_S)
        try:
            return child.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    @staticmethod
    def _end_input(child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        with contextlib.suppress(OSError):
            child.stdin.close()

    def _log(self, name: str) -> Path:
        return self._run / FOLDER / f"{name}.log"
