"""Ledger: what a run writes down about itself. Records of all its processes, their memory and time, and how it ended.

Owns metrics.jsonl, events.jsonl and the sums in the `Outcome`. Does not own what is worth a record: whoever reports does.
Every record is {"time": s since the epoch, "kind": ..., "source": role group or service, ...}, flat. What could not be
written or shown, here or in a worker, is counted (`telling.py`) and is in the sums.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rondo.runtime.closing import Closing
from rondo.runtime.processes import process
from rondo.runtime.records import timeline
from rondo.runtime.records.record import JsonLines
from rondo.runtime.records.telling import NOT_TOLD, PROCESS, TOLD_AGAIN, telling
from rondo.runtime.supervision.incarnation import Incarnation
from rondo.runtime.supervision.machine import Supervision
from rondo.runtime.supervision.spec import Outcome

_RESERVED = ("time", "kind", "source")
_SAMPLE_S, _MEMORY_S = 1.0, 10.0
_SELF = "supervisor"


class Ledger(Closing):
    """Opens both files to append. `on_event` gets every record after it is written."""

    def __init__(self, run_dir: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._metrics = JsonLines(run_dir / "metrics.jsonl")
        self._events = JsonLines(run_dir / "events.jsonl")
        self._on_event = on_event
        self._untold: dict[str, int] = {}
        self._began_at = time.monotonic()
        self._sampled_at = self._told_at = self._memory_at = 0.0
        self._peak_bytes: dict[str, int] = {}
        self._cpu_s: dict[tuple[str, int], float] = {}
        self._own_cpu_s = time.process_time()

    def record(self, source: str, kind: str, data: Mapping[str, Any]) -> None:
        """Kind "metrics" goes to metrics.jsonl, any other to events.jsonl. ValueError for names that are taken."""
        taken = [name for name in _RESERVED if name in data]
        if taken:
            raise ValueError(f"a record must not hold {', '.join(_RESERVED)}, got {', '.join(taken)}. Rename it")
        lines = self._metrics if kind == "metrics" else self._events
        if kind in (NOT_TOLD, TOLD_AGAIN) and source != _SELF:
            self._untold[f"{source} {data['what']}"] = data["num"]
        written = lines.write({"kind": kind, "source": source, **data})
        with telling("events as they come"):
            self._on_event(written)

    def listen(self) -> None:
        """Records what this process cannot tell, on its event loop, which runs."""
        loop = asyncio.get_running_loop()

        def hear(kind: str, data: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self.record, _SELF, kind, data)

        PROCESS.listener = hear

    def sample(self, lives: Iterable[Incarnation], others: Mapping[str, int], segment_bytes: int) -> None:
        """Looks at memory and processor time, once a second, and at once where there are processes of which nothing is known yet.
        `others`: processes that no life has, pids by name. `segment_bytes`: shared memory that is held for them. Every
        ten seconds what is resident is a record."""
        now, lives = time.monotonic(), list(lives)
        known = all(self._peak_bytes.get(life.name) for life in lives if life.ending is None and life.pids)
        if now < self._sampled_at + _SAMPLE_S and known and all(map(self._peak_bytes.get, others)):
            return
        self._sampled_at = now
        own = process.stat(os.getpid())
        held = {_SELF: own.rss_bytes if own is not None else 0}
        for life in lives:
            if life.ending is None:
                usage = life.usage()
                held[life.name] = usage.rss_bytes
                self._cpu_s[life.name, life.number] = usage.cpu_s
        for name, pid in others.items():
            found = process.stat(pid)
            if found is not None and found.alive:
                held[name] = found.rss_bytes
                self._cpu_s[name, pid] = found.cpu_ticks / process.TICKS_PER_S
        for name, num_bytes in held.items():
            self._peak_bytes[name] = max(self._peak_bytes.get(name, 0), num_bytes)
        if now >= self._memory_at + _MEMORY_S:
            self._memory_at = now
            self.record(_SELF, "metrics", {"memory_bytes": {**held, "segments": segment_bytes}})
        if now >= self._told_at + timeline.CPU_S:
            self._told_at = now
            timeline.figures("cores", self._cpu_by_name())

    def sum_up(self, machine: Supervision, roles: Mapping[str, str], exit_code: int) -> Outcome:
        """The end of the run. `roles` gives the role of each role group."""
        wall_s = time.monotonic() - self._began_at
        cause = machine.first_cause
        recovery_s: dict[str, float] = {}
        for name, seconds in machine.recoveries:
            role = roles.get(name, name)
            recovery_s[role] = max(recovery_s.get(role, 0.0), seconds)
        cpu_s = self._cpu_by_name()
        timeline.figures("cores", cpu_s)
        self.record(_SELF, "finished", {"exit_code": exit_code, "wall_s": wall_s})
        return Outcome(
            exit_code=exit_code,
            first_cause=str(cause) if cause is not None else None,
            restarts=machine.restarts(),
            recovery_s=recovery_s,
            wall_s=wall_s,
            attempt=machine.attempt,
            memory_bytes=dict(self._peak_bytes),
            cpu_share=sum(cpu_s.values()) / (wall_s * len(os.sched_getaffinity(0))),
            cores={name: seconds / wall_s for name, seconds in cpu_s.items()},
            untold=self._untold,
        )

    def _cpu_by_name(self) -> dict[str, float]:
        """Seconds of processor time of all lives of each role group and service so far, and of this process."""
        cpu_s = {_SELF: time.process_time() - self._own_cpu_s}
        for (name, _), seconds in self._cpu_s.items():
            cpu_s[name] = cpu_s.get(name, 0.0) + seconds
        return cpu_s

    def close(self) -> None:
        PROCESS.listener = None
        self._metrics.close()
        self._events.close()
