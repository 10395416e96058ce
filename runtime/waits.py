"""Waits: every wait has a name and a deadline, and is listed while it lasts.

Owns the list "who waits for what", the seconds spent waiting by name, and the error past a deadline. Does not own what
is waited for. Names come from a small fixed set ("call lease", "round", "proof"), because seconds are summed by name;
who is waited for goes into `peer`.

Invariant: a wait is in the list from its begin to its end, however it ends; past its deadline the body is cancelled and
`DeadlineExceeded` names both sides. A cancellation from outside stays a cancellation.

    async with waiting("round", peer="coordinator", deadline_s=60):
        await ready.wait()

Three ways in: `waiting` and `wait_for` for coroutines, `blocking` for threads (the caller hands the deadline to its own
blocking call), and `Waits.begin` / `Waits.end` for the transport, whose calls share one timer.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from rondo.runtime.errors import DeadlineExceeded

T = TypeVar("T")

_INF = math.inf


@dataclass(frozen=True, slots=True)
class Pending:
    """One wait that lasts, as seen at one moment. `since` is on the monotonic clock, `seconds` its age."""

    name: str
    waiter: str
    peer: str
    since: float
    deadline_s: float | None
    seconds: float


class Wait:
    """One listed wait. `due` is the monotonic time of its deadline, infinity without one."""

    __slots__ = ("deadline_s", "due", "name", "peer", "since")

    def __init__(self, name: str, peer: str, deadline_s: float | None, since: float) -> None:
        self.name = name
        self.peer = peer
        self.deadline_s = deadline_s
        self.since = since
        self.due = _INF if deadline_s is None else since + deadline_s


class Waits:
    """The waits of one process. Safe from any thread; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.waiter = "main"
        self.on_end: Callable[[Wait, float], None] | None = None
        """Told of every wait of `notable_s` seconds or more when it ends, on the thread that ends it."""
        self.notable_s = _INF
        self._listed: dict[int, Wait] = {}
        self._totals: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, peer: str, deadline_s: float | None) -> Wait:
        """Lists a wait. Whoever begins it ends it, also when it fails, and watches its deadline."""
        wait = Wait(name, peer, deadline_s, self.clock())
        self._listed[id(wait)] = wait  # one dict operation: atomic
        return wait

    def end(self, wait: Wait) -> None:
        """Takes a wait off the list and adds its seconds to its name's total."""
        seconds = self.clock() - wait.since
        name = wait.name
        with self._lock:
            del self._listed[id(wait)]
            self._totals[name] = self._totals.get(name, 0.0) + seconds
        if seconds >= self.notable_s and self.on_end is not None:
            self.on_end(wait, seconds)

    def exceeded(self, wait: Wait) -> DeadlineExceeded:
        """The error for a wait past its deadline."""
        return DeadlineExceeded(wait.name, self.waiter, wait.peer, wait.deadline_s or 0.0)

    def pending(self) -> tuple[Pending, ...]:
        """Every wait that lasts, oldest first."""
        with self._lock:
            listed = list(self._listed.values())
        now = self.clock()
        rows = (Pending(w.name, self.waiter, w.peer, w.since, w.deadline_s, now - w.since) for w in listed)
        return tuple(sorted(rows, key=lambda row: row.since))

    def totals(self) -> dict[str, float]:
        """Seconds waited by name, finished and pending waits together."""
        with self._lock:
            totals, listed = dict(self._totals), list(self._listed.values())
        now = self.clock()
        for wait in listed:
            totals[wait.name] = totals.get(wait.name, 0.0) + now - wait.since
        return totals

    @contextmanager
    def blocking(self, name: str, *, peer: str, deadline_s: float | None) -> Generator[Wait, None, None]:
        """`blocking` on this list."""
        wait = self.begin(name, peer, deadline_s)
        try:
            yield wait
        finally:
            self.end(wait)


PROCESS = Waits()
"""The list of this process, which the admin endpoint and `rondo.waits` show."""


class waiting:  # reads as the statement it is
    """`async with waiting(name, peer=..., deadline_s=...)`: lists the body as a wait and cancels it past the deadline.

    Raises `DeadlineExceeded` then. `deadline_s=None` waits without end, which only an idle server has reason to do. Where the
    length of the body is not known but `moved` tells when the peer last got on (in seconds of the list's clock), the deadline
    counts from then. The value is the `Wait`; its `peer` may be changed while it lasts, to name who is still missing.
    """

    __slots__ = ("_arguments", "_cancelling", "_expired", "_moved", "_task", "_timer", "_wait", "_waits")

    def __init__(
        self,
        name: str,
        *,
        peer: str,
        deadline_s: float | None,
        waits: Waits | None = None,
        moved: Callable[[], float] | None = None,
    ) -> None:
        self._arguments = (name, peer, deadline_s)
        self._moved = moved
        self._waits = PROCESS if waits is None else waits
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Wait:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("waiting must be used inside a task, got none. Use blocking() in threads")
        self._task: asyncio.Task[object] = task
        self._cancelling = task.cancelling()
        deadline_s = self._arguments[2]
        if deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline_s), self._expire)
        self._wait = self._waits.begin(*self._arguments)
        return self._wait

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waits.end(self._wait)
        # uncancel() counts: if somebody else cancelled the task too, theirs wins and stays a cancellation.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._waits.exceeded(self._wait) from error

    def _expire(self) -> None:
        if self._moved is not None:
            left_s = self._moved() + (self._wait.deadline_s or 0.0) - self._waits.clock()
            if left_s > 0:
                self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)
                return
        self._expired = True
        self._task.cancel()


async def wait_for(
    awaitable: Awaitable[T], *, name: str, peer: str, deadline_s: float | None, moved: Callable[[], float] | None = None
) -> T:
    """Awaits under a name and a deadline, as `waiting`. Raises `DeadlineExceeded`; the awaitable is cancelled then."""
    async with waiting(name, peer=peer, deadline_s=deadline_s, moved=moved):
        return await awaitable


async def happens(event: asyncio.Event, limit_s: float) -> bool:
    """Whether it does, before so long; a pause of whoever looks again then, and no wait that is listed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


async def until(event: asyncio.Event, holds: Callable[[], bool]) -> None:
    """Until it holds, which is looked at whenever the event is set; within a wait of the caller's."""
    while not holds():
        event.clear()
        await event.wait()


async def finished(work: Awaitable[object]) -> None:
    """The end of what must not be left half done; a cancellation of the caller comes after it. Its error stays its own."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()
    if cancelled is not None:
        raise cancelled


blocking = PROCESS.blocking
"""`with blocking(name, peer=..., deadline_s=...)`: lists a thread's blocking call, which keeps the deadline itself."""
pending = PROCESS.pending
totals = PROCESS.totals


def set_waiter(name: str) -> None:
    """Names this process in the list and in errors, for instance "rollout-0.1"."""
    PROCESS.waiter = name


def waiter() -> str:
    """The name of this process, "main" until it has one."""
    return PROCESS.waiter
