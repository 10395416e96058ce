"""Heartbeats: a few words in shared memory by which the supervisor sees that a process lives, moves, and what it does.

Owns the layout of the words and both ends of them. Does not own what silence means: `supervision.py` decides. A process
writes its own slot and nobody else's, but for the one word by which the supervisor asks it to leave; nobody waits.

    slot of a rank, 128 bytes:  0 beat  8 progress  16 section limit  24 left  32 asked  40 save limit  48 section since
                                56 excuse  64 section name (64 bytes)

`beat` is the time of the event loop's last sign of life and `section limit` the time by which the open section with the
nearest limit must be over (0: none is open), both in milliseconds of the monotonic clock, which all processes of a node
share; `since` is when that section was opened. `excuse` is 1 while a section is open that may take all of its limit,
and 2 while one is open in which the loop need not beat either. `save limit` is that of an open section named "save": a stop's
grace does not cut it off. `left` is 1 from the moment a process ends on purpose. `asked` is 1 from the moment the supervisor
wants it to save and leave: SIGTERM says "look here", since torchrun and batch systems send that signal too, for reasons of
their own.
Words are aligned, so they are read and written whole; a torn name only misspells.

    beat = HeartbeatWriter(client.segment(segment_name("actor-0", 2), 0).view(), rank=0)
    with beat.section("load", limit_s=600): ...
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SLOT_BYTES = 128
BEAT_S = 0.25
"""Seconds between two beats of a loop."""

SAVE = "save"
"""The section in which a role writes down what a resumed run goes on from."""

_BEAT, _PROGRESS, _LIMIT, _LEFT, _ASKED, _SAVING, _SINCE, _EXCUSE = range(8)
_WORDS = SLOT_BYTES // 8
_NAME_AT = 64
_SLOT = struct.Struct("@8Q64s")  # native: each word is read at once


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's slot. Times in monotonic seconds, 0 for never; `section` is "" outside of sections."""

    rank: int
    beat_s: float
    progress: int
    section: str = ""
    section_limit_s: float = 0.0
    left: bool = False
    save_limit_s: float = 0.0
    section_since_s: float = 0.0
    patient: bool = False
    """A section is open whose limit alone says when it has lasted too long."""
    silent: bool = False


@dataclass(frozen=True, slots=True)
class _Opened:
    limit_s: float
    name: str
    since_s: float
    excuse: int


_PATIENT, _SILENT_TOO = 1, 2
_NONE = _Opened(0.0, "", 0.0, 0)


def segment_name(group: str, incarnation: int) -> str:
    """Each life of a group has a segment of its own, so that a late process of a past one touches nothing."""
    return f"heartbeat/{group}/{incarnation}"


def segment_bytes(num_ranks: int) -> int:
    return num_ranks * SLOT_BYTES


class HeartbeatWriter:
    """A process's side. `beat` belongs to the event loop; sections and progress may come from any thread."""

    def __init__(self, view: memoryview, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        slot = view[rank * SLOT_BYTES : (rank + 1) * SLOT_BYTES]
        self._words = slot.cast("Q")
        self._name = slot[_NAME_AT:]
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, _Opened] = {}
        self._next = 0

    def beat(self) -> None:
        self._words[_BEAT] = round(self._clock() * 1000)

    def progress(self) -> None:
        with self._lock:
            self._words[_PROGRESS] += 1

    def leave(self) -> None:
        """Says that the end of this process is on purpose; its exit code may be collected before anybody reads it."""
        self._words[_LEFT] = 1

    @property
    def asked_to_leave(self) -> bool:
        return bool(self._words[_ASKED])

    @contextlib.contextmanager
    def section(self, name: str, limit_s: float, *, silent: bool = True, patient: bool = True) -> Iterator[None]:
        """It may last for `limit_s` seconds at most; of several, each keeps its limit. While one that is `silent` lasts, the loop
        need not beat; while one that is `patient` lasts, a run in which nothing else moves is not judged."""
        with self._lock:
            key, self._next, now = self._next, self._next + 1, self._clock()
            excuse = _SILENT_TOO if silent else _PATIENT if patient else 0
            self._open[key] = _Opened(now + limit_s, name, now, excuse)
            self._publish()
        try:
            yield
        finally:
            with self._lock:
                del self._open[key]
                if silent:  # rightly until now; what comes next starts with a sign of life
                    self.beat()
                self._publish()

    def _publish(self) -> None:
        opened = self._open.values()
        nearest = min(opened, key=lambda each: each.limit_s, default=_NONE)
        saves = min((each.limit_s for each in opened if each.name == SAVE), default=0.0)
        self._name[:] = nearest.name.encode()[: len(self._name)].ljust(len(self._name), b"\0")
        self._words[_EXCUSE] = max((each.excuse for each in opened), default=0)
        self._words[_SINCE] = round(nearest.since_s * 1000)
        self._words[_SAVING] = round(saves * 1000)
        self._words[_LIMIT] = round(nearest.limit_s * 1000)


def ask_to_leave(view: memoryview) -> None:
    """The supervisor's side: every rank is to save and leave. SIGTERM makes them look."""
    words = view.cast("Q")
    for rank in range(len(view) // SLOT_BYTES):
        words[rank * _WORDS + _ASKED] = 1


def read_beats(view: memoryview) -> tuple[Beat, ...]:
    """The slots of all ranks, by rank."""
    beats = []
    for rank, (beat, progress, limit, left, _, saving, since, excuse, name) in enumerate(_SLOT.iter_unpack(view)):
        text, excused = name.rstrip(b"\0").decode(errors="replace"), (excuse >= _PATIENT, excuse == _SILENT_TOO)
        times = limit / 1000, bool(left), saving / 1000, since / 1000
        beats.append(Beat(rank, beat / 1000, progress, text, *times, *excused))
    return tuple(beats)
