"""Timeline: what this process did when. Spans, and the waits of `waits.py`, appended to small files of the run directory.

Owns recording: a clock read and an append where a span begins and ends (about a microsecond), and a thread that writes them
down once a second. Does not own what a span means, nor reading them back (`launch/report/timeline.py` does).

    with span("train", "actor", step=3, rows=64): ...
    with span("publish", "actor/publication", version=4) as publishing: publishing.tell(num_bytes=1 << 20)

A lane is "role" or "role/activity"; what may overlap in time has a lane of its own.

    RUN/timeline/<group>.<rank>/<incarnation>.<number>.jsonl
      {"timeline":1,"group":"actor-0",...,"wall_ns":...,"monotonic_ns":...,"boot":"..."}    first line of every file
      ["train","actor",<start>,<duration>,3,{"rows":64},0]           nanoseconds, monotonic; the last field: 1 = still open
      {"at":<ns>,"name":"cpu","values":{"process":1.25,"loop":0.03,"delayed":0.4}}  seconds of processor time so far

Invariants: recording never waits for a disk and never raises; a process's files take `NUM_FILES * FILE_BYTES` at most, the
oldest go first; a batch is one write, so that a killed process leaves whole lines but perhaps for the last one; what was
open when it died is there with the time at which it was last seen open. What a full disk does not take is dropped and counted,
and the recording goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from rondo.runtime import waits
from rondo.runtime.processes.place import place
from rondo.runtime.records.telling import telling

FOLDER = "timeline"
"""In the run directory."""
FORMAT = 1
FILE_BYTES = 4 << 20
NUM_FILES = 4
FLUSH_S = 1.0
CPU_S = 2.0
"""Seconds between two looks at processor time."""
SHORTEST_WAIT_S = 0.001
"""Shorter waits are no spans; `waits.totals` has their sum."""

_LONG_NS = 1_000_000_000
"""What has been open for longer is written down while it lasts."""
_NEAR_NS = 1_000_000
_MOST_HELD = 1 << 16


class Span:
    """One activity, recorded when it ends, however it ends. Made by `span`; without a timeline it is recorded nowhere."""

    __slots__ = ("_timeline", "args", "lane", "name", "start_ns", "step")

    def __init__(
        self, timeline: Timeline | None, name: str, lane: str, step: int | None, args: dict[str, Any] | None
    ) -> None:
        self._timeline = timeline
        self.name = name
        self.lane = lane
        self.step = step
        self.args = args

    def tell(self, *, step: int | None = None, **args: Any) -> None:
        """Adds what is known by now."""
        if self._timeline is None:
            return
        if step is not None:
            self.step = step
        self.args = {**(self.args or {}), **args}

    def __enter__(self) -> Span:
        timeline = self._timeline
        if timeline is not None:
            self.start_ns = timeline.clock()
            timeline.opened[id(self)] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        timeline = self._timeline
        if timeline is None:
            return
        del timeline.opened[id(self)]
        timeline.add((self.name, self.lane, self.start_ns, timeline.clock() - self.start_ns, self.step, self.args, 0))


class Timeline:
    """The record of one process. `clock` gives monotonic nanoseconds. Spans may come from any thread.

    `start` begins to write once a second; without it `flush` writes what has come so far.
    """

    def __init__(
        self,
        run_dir: Path,
        group: str,
        rank: int = 0,
        incarnation: int = 0,
        attempt: int = 0,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        file_bytes: int = FILE_BYTES,
        num_files: int = NUM_FILES,
    ) -> None:
        self.clock = clock
        self.opened: dict[int, Span] = {}
        self.num_dropped = 0
        self._folder = run_dir / FOLDER / f"{group}.{rank}"
        self._header = {
            "timeline": FORMAT, "group": group, "rank": rank, "incarnation": incarnation, "attempt": attempt,
            "pid": os.getpid(), "wall_ns": time.time_ns(), "monotonic_ns": clock(),
            "boot": place()["boot_id"],  # processes with the same one share a monotonic clock
        }  # fmt: skip
        self._file_bytes, self._num_files = file_bytes, num_files
        self._held: deque[Any] = deque()  # append and popleft are atomic
        self._waits: dict[str, list[Any]] = {}  # name -> [start, end, peer]: waits that overlap become one
        self._lock = threading.Lock()  # over `_waits`
        self._writing = threading.Lock()  # over the file: never held by whoever records
        self._fd, self._written, self._number = -1, 0, 0
        self._cpu_at = 0
        self._ended = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def span(self, name: str, lane: str, step: int | None = None, **args: Any) -> Span:
        return Span(self, name, lane, step, args or None)

    def add(self, record: Any) -> None:
        """Takes one finished record; drops it, and counts it, where the disk has not kept up."""
        if len(self._held) < _MOST_HELD:
            self._held.append(record)
        else:
            self.num_dropped += 1

    def figures(self, name: str, values: Mapping[str, float]) -> None:
        """Values that a graph shows, as of now."""
        self.add({"at": self.clock(), "name": name, "values": dict(values)})

    def waited(self, wait: waits.Wait, seconds: float) -> None:
        """A wait that ended just now. Those of one name that overlap, or follow at once, become one span."""
        start = int(wait.since * 1e9)
        end = start + int(seconds * 1e9)
        with self._lock:
            held = self._waits.get(wait.name)
            if held is None:
                self._waits[wait.name] = [start, end, wait.peer]
            elif start <= held[1] + _NEAR_NS:
                held[0], held[1] = min(held[0], start), max(held[1], end)
            else:
                self.add(_wait_record(wait.name, held, 0))
                self._waits[wait.name] = [start, end, wait.peer]

    # ---- writing ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Writes once a second, on a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._write_on, name="timeline", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Writes what has come so far, and what is open for long. OSError when the file cannot take it."""
        now = self.clock()
        if now >= self._cpu_at:
            self._cpu_at = now + int(CPU_S * 1e9)
            self.figures("cpu", processor_seconds())
        with self._lock:
            ended, self._waits = self._waits, {}
        with self._writing:
            records = [self._held.popleft() for _ in range(len(self._held))]
            records += [_wait_record(name, held, 0) for name, held in ended.items()]
            records += self._open_for_long(now)
            if self.num_dropped:
                records.append({"at": now, "name": "dropped", "values": {"spans": self.num_dropped}})
            self._append(records)

    def close(self) -> None:
        """Writes the rest and lets go of the file. Safe to call twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if not self._closed:
            self._cpu_at = 0
            with telling(FOLDER):
                self.flush()
            self._closed = True
            self._close_file()

    def _write_on(self) -> None:
        while not self._ended.wait(FLUSH_S):
            with telling(FOLDER):
                self.flush()

    def _open_for_long(self, now: int) -> list[Any]:
        spans = [span for span in list(self.opened.values()) if now - span.start_ns > _LONG_NS]
        records: list[Any] = [(s.name, s.lane, s.start_ns, now - s.start_ns, s.step, s.args, 1) for s in spans]
        for wait in waits.pending():
            start = int(wait.since * 1e9)
            if now - start > _LONG_NS:
                records.append(_wait_record(wait.name, [start, now, wait.peer], 1))
        return records

    def _append(self, records: list[Any]) -> None:
        if not records or self._closed:
            return
        try:
            self._write(b"".join([orjson.dumps(record, default=str) + b"\n" for record in records]))
        except OSError:
            self.num_dropped += len(records)
            raise
        if self._written >= self._file_bytes:
            self._close_file()
            self._number += 1

    def _write(self, data: bytes) -> None:
        """All of it, at the beginning of a file after the header, or nothing."""
        if self._fd < 0:
            self._open_file()
        if self._written == 0:
            data = orjson.dumps(self._header) + b"\n" + data
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, self._written)
            raise OSError(f"a batch must be written whole to {self._folder}, got {written} of {len(data)} bytes")
        self._written += written

    def _open_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._header['incarnation']:06d}.{self._number:06d}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._written = 0
        for old in sorted(self._folder.glob("*.jsonl"))[: -self._num_files]:
            old.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _wait_record(name: str, held: list[Any], still: int) -> tuple[Any, ...]:
    start, end, peer = held
    return (f"wait: {name}", f"waits/{name}", start, end - start, None, {"peer": peer}, still)


def processor_seconds() -> dict[str, float]:
    """Processor time of this process so far; of its main thread, where the event loop runs; and for how long its threads
    were ready to run and had no core ("delayed", where the kernel tells it)."""
    loop = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    used = time.clock_gettime(loop)  # first: the part is never more than the whole
    seconds = {"process": time.process_time(), "loop": used}
    if not Path("/proc/self/schedstat").exists():
        return seconds
    delayed_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            delayed_ns += int((thread / "schedstat").read_text().split()[1])
    return {**seconds, "delayed": delayed_ns / 1e9}


# ---- the record of this process -------------------------------------------------------------------------------------

_current: Timeline | None = None


def begin(run_dir: Path, group: str, rank: int = 0, incarnation: int = 0, attempt: int = 0) -> Timeline:
    """This process records from now on, its waits too."""
    global _current
    end()
    made = _current = Timeline(run_dir, group, rank, incarnation, attempt)
    waits.PROCESS.on_end, waits.PROCESS.notable_s = made.waited, SHORTEST_WAIT_S
    made.start()
    return made


def end() -> None:
    """Writes down the rest and records no more. Safe to call without a `begin`, and twice."""
    global _current
    timeline, _current = _current, None
    if timeline is not None:
        waits.PROCESS.on_end, waits.PROCESS.notable_s = None, float("inf")
        timeline.close()


_NOWHERE = Span(None, "", "", None, None)


def span(name: str, lane: str, step: int | None = None, **args: Any) -> Span:
    """`with span("train", "actor", step=3): ...`; costs nothing where this process records no timeline."""
    timeline = _current
    return _NOWHERE if timeline is None else Span(timeline, name, lane, step, args or None)


def figures(name: str, values: Mapping[str, float]) -> None:
    """Values that a graph shows, as of now."""
    if _current is not None:
        _current.figures(name, values)
