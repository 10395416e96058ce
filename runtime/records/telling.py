"""Telling: whatever only tells changes neither a run's life nor its exit code.

Owns the rule and its count. Does not own what is told: a line of a file, a picture, a poll, a dump. Invariant: no `Exception`
leaves the body of a `telling`; it is counted by name, told once when it begins and once when it works again for good.

    with telling("events.jsonl"):
        os.write(fd, line)                  # on a full disk: counted, logged at the first

    await tell_every("view", 0.25, refresh)        # until cancelled, whatever `refresh` raises
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from rondo.runtime.errors import RondoError

NOT_TOLD, TOLD_AGAIN = "not_told", "told_again"
"""Kinds of the records that `Untold.listener` gets."""

STEADY_S = 10.0
"""After so long without a failure a thing counts as working again: the last bytes of a full disk come and go."""

log = logging.getLogger("rondo.telling")


class Untold:
    """What one process could not tell, by name. Safe from any thread.

    `listener` gets (kind, {"what": name, "num": failures so far, ...}) when a thing begins to fail, and when it works again.
    `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.listener: Callable[[str, dict[str, Any]], None] | None = None
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._failing: dict[str, float] = {}  # name -> when it failed last
        self._lock = threading.Lock()

    def counts(self) -> dict[str, int]:
        """Failures of each thing that ever failed."""
        with self._lock:
            return dict(self._counts)

    def failed(self, what: str, error: Exception, *, logs: bool = True) -> None:
        with self._lock:
            num = self._counts[what] = self._counts.get(what, 0) + 1
            begins = what not in self._failing
            self._failing[what] = self._clock()
        if begins:
            why = str(error) or type(error).__name__
            if logs:
                log.error("%s cannot be told from here on, the run goes on: %s", what, why, exc_info=_unforeseen(error))
            self._hear(NOT_TOLD, {"what": what, "num": num, "why": why})

    def worked(self, what: str) -> None:
        if what not in self._failing:
            return
        with self._lock:
            if self._clock() < self._failing.get(what, math.inf) + STEADY_S:
                return
            del self._failing[what]
            num = self._counts[what]
        log.warning("%s can be told again, after %d failures", what, num)
        self._hear(TOLD_AGAIN, {"what": what, "num": num})

    def _hear(self, kind: str, data: dict[str, Any]) -> None:
        if self.listener is not None:
            try:
                self.listener(kind, data)
            except Exception as error:  # it may itself be what cannot be told
                log.error("nobody hears what cannot be told", exc_info=error)


PROCESS = Untold()
"""Of this process."""


class telling:  # reads as the statement it is
    """`with telling(what): ...`: an `Exception` of the body ends the body and nothing else. A cancellation passes."""

    __slots__ = ("_untold", "_what")

    def __init__(self, what: str, untold: Untold | None = None) -> None:
        self._what, self._untold = what, PROCESS if untold is None else untold

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            self._untold.worked(self._what)
        elif isinstance(error, Exception):
            self._untold.failed(self._what, error)
        return error is None or isinstance(error, Exception)


async def tell_every(what: str, period_s: float, work: Callable[[], Awaitable[Any] | None]) -> None:
    """`work`, a pause of `period_s` seconds, and so on until it is cancelled; a time that fails does not end it."""
    while True:
        with telling(what):
            if (begun := work()) is not None:
                await begun
        await asyncio.sleep(period_s)


def _unforeseen(error: Exception) -> Exception | None:
    """What is worth a traceback: not a full disk, a closed pipe, or what names its cause."""
    return None if isinstance(error, OSError | RondoError) else error
