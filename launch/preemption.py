"""Preemption: a notice that this machine is about to be taken away ends a run in time to save.

Owns the look for the file that is a notice, and how much of a notice's time the run gets. Does not own the stop: it is that of
any signal (`machine.py`), with a deadline. SIGUSR1 is the same notice, which the supervisor hears itself.

    await watch(Path("/run/node/preempted"), lambda reason: supervisor.request_stop(reason, notice=True))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rondo.runtime.records.telling import telling

_LOOK_S = 1.0
_END_S = 5.0
"""For the summary, once everything else is gone."""
_SHOWN = 200


def within_s(grace_s: float | None) -> float | None:
    """Of what a notice leaves, the time after which everything but the leader is to be gone."""
    return None if grace_s is None else max(grace_s - _END_S, grace_s / 2)


async def watch(file: Path, told: Callable[[str], None], period_s: float = _LOOK_S) -> None:
    """Until the file is there; then tells why the run is to leave, once. A file that cannot be looked at is no notice."""
    said = None
    while said is None:
        with telling("preemption.file"):  # on a thread: a file system that hangs holds nobody else up
            said = await asyncio.to_thread(_look, file)
        if said is None:
            await asyncio.sleep(period_s)
    told(f"notice in {file}" + (f": {said}" if said else ""))


def _look(file: Path) -> str | None:
    """Its first line; None where there is no such file."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.readline(_SHOWN).strip()
    except FileNotFoundError:
        return None
