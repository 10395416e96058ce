"""Events that are applied and wait to be in the journal, and what becomes of a journal that finds no room.

Owns the order of that: nothing of an event leaves the process before `write` says that all is in the journal. Does not own what
events mean, nor what they let out.

    pending.add(event)
    if pending.write(): ...            # tails move, answers go
    pending.check()                    # else NotYet: whoever asked asks again

Invariant: a full disk costs time and nothing else: events stay in order until they are written, and callers are told to ask
again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from rondo.comm.bus.journal import Event, Journal
from rondo.runtime.errors import NotYet
from rondo.runtime.waits import PROCESS, Wait

ROOM_S = 1.0
"""While the journal waits for room, callers ask so often."""
TELL_ROOM_S = 60.0
"""How often it is told that it waits, which the supervisor takes for progress: nothing hangs."""
_FULL = "the disk is full"


class Pending:
    """`state` is what a new file of the journal begins with; `report` tells people (kind, data)."""

    def __init__(
        self,
        journal: Journal,
        state: Callable[[], dict[str, Any]],
        report: Callable[[str, dict[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._state = state
        self._report = report
        self._clock = clock
        self._events: list[Event] = []
        self._no_room: Wait | None = None  # since when the journal waits for room on the disk
        self._told_at = -math.inf  # when that was told last

    def add(self, event: Event) -> None:
        self._events.append(event)

    def write(self) -> bool:
        """Whether everything is in the journal now, and its effects may go."""
        if not self._events:
            return True
        try:
            self._journal.append(self._events)
        except OSError as error:
            self._wait(error.strerror or str(error))
            return False
        self._events = []
        if self._journal.short():
            self._wait(_FULL)
        elif self._journal.due:
            with contextlib.suppress(OSError):  # no room for a snapshot: later, while this file goes on
                self._journal.rotate({"event": "snapshot", "state": self._state()})
        return True

    def check(self) -> None:
        """Raises NotYet while something is not in the journal."""
        if self._events:
            raise NotYet("its journal must have room, the disk is full", ROOM_S)

    def check_room(self) -> None:
        """Raises NotYet while nobody gets anything, since the journal waits for room."""
        if self._no_room is not None:
            raise NotYet("its journal must have room, the disk is full", ROOM_S)

    @property
    def waits(self) -> bool:
        """Whether the journal waits for room."""
        return self._no_room is not None

    def goes_on(self) -> bool:
        """Look for room again, where it waits for some: whether it waits no more, and all is written."""
        assert self._no_room is not None
        self.write()
        if self._events or self._journal.short():
            self._wait(_FULL)
            return False
        PROCESS.end(self._no_room)
        self._report("journal_goes_on", {"waited_s": PROCESS.clock() - self._no_room.since})
        self._no_room = None
        return True

    def _wait(self, why: str) -> None:
        if self._no_room is None:
            self._no_room = PROCESS.begin("room for the journal", peer=str(self._journal.folder), deadline_s=None)
            self._told_at = -math.inf
        if self._clock() >= self._told_at + TELL_ROOM_S:
            self._told_at = self._clock()
            self._report("journal_waits", {"why": why, "folder": str(self._journal.folder)})
