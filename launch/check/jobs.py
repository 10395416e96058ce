"""Processes of a check: jobs of the nursery that have ended, one way or another, before the check goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from rondo.runtime.supervision.launcher import Job
from rondo.runtime.supervision.nursery import Forked, Nursery
from rondo.runtime.waits import waiting

_ENDS_S, _PAUSE_S = 2.0, 0.005


def run_jobs(
    nursery: Nursery, jobs: Sequence[Job], name: str, deadline_s: float, begun: Callable[[], object] = lambda: None
) -> list[int]:
    """Their exit codes; `begun` is called when all have begun. DeadlineExceeded, WorkerDied; however it ends, none of them runs
    on, but for what the kernel holds."""
    started: list[Forked] = []

    async def run() -> list[int]:
        async with waiting(name, peer="its processes", deadline_s=deadline_s):
            for job in jobs:
                started.append(await nursery.start(job))
            begun()
            return await asyncio.gather(*(each.ended() for each in started))

    try:
        return asyncio.run(run())
    finally:
        for each in started:
            _end(each)


def _end(process: Forked) -> None:
    """A process of ours whose session may not have begun yet."""
    due = time.monotonic() + _ENDS_S
    while process.poll() is None and time.monotonic() < due:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        time.sleep(_PAUSE_S)
