"""A deterministic asyncio loop: the order of ready callbacks comes from a seed, and time moves only when nobody can run.

    with SeededLoop(7) as loop:
        loop.run_until_complete(scenario())
        loop.trace                      # hash of the order in which callbacks ran

Owns the schedule. A turn runs one callback, chosen by the seed among all that are ready, so any order of tasks that asyncio
could be brought to by other timing is reachable. `Stuck` is raised where nothing is ready, no timer is set and no descriptor
is readable: a lost wake-up shows at once, without any waiting.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import zlib
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any


class Stuck(Exception):
    """Tasks wait, and nothing can ever wake them."""


class SeededLoop(asyncio.SelectorEventLoop):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._now = 0.0
        self.trace = 0
        self._numbers: dict[Any, int] = {}
        self.num_turns = 0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        self._process_events(self._selector.select(0))  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready and scheduled:
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and (scheduled[0]._when <= self._now or scheduled[0]._cancelled):
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)
        if not ready:
            if self._stopping:  # type: ignore[attr-defined]
                return
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Stuck(f"tasks must be woken, got {waiting} waiting with nothing ready.")
        # By label: sets of waiters are in the order of their addresses, which differs from run to run.
        named = sorted((self._label(handle), at) for at, handle in enumerate(ready))
        label, at = named[self._random.randrange(len(named))]
        handle = ready[at]
        del ready[at]
        if not handle._cancelled:
            self.trace = zlib.crc32(label.encode(), self.trace)
            self.num_turns += 1
            handle._run()

    def _label(self, handle: Any) -> str:
        owner, name = getattr(handle._callback, "__self__", None), ""
        if isinstance(owner, asyncio.Task):
            name = owner.get_name()
            if name.startswith("Task-"):  # asyncio counts these over the life of the process
                name = f"task{self._numbers.setdefault(owner, len(self._numbers))}"
        return f"{name}/{getattr(handle._callback, '__name__', type(handle._callback).__name__)};"

    def __enter__(self) -> SeededLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        left = asyncio.all_tasks(self)
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.wait(left))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()


def later(seconds: float) -> None:
    """The running loop's clock is ahead by so much from now on: what has a deadline within that is late at once, and no busy
    machine makes anything late before."""
    loop: Any = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


def explore(scenario: Callable[[], Coroutine[Any, Any, None]], num_schedules: int) -> tuple[int, list[tuple[int, str]]]:
    """Run a scenario under seeds 0 to `num_schedules - 1`: how many distinct orders there were, and (seed, error) of failures."""
    seen: set[int] = set()
    failed: list[tuple[int, str]] = []
    for seed in range(num_schedules):
        with SeededLoop(seed) as loop:
            try:
                loop.run_until_complete(scenario())
            except (Stuck, AssertionError, ExceptionGroup) as error:
                failed.append((seed, f"{type(error).__name__}: {error}"))
            seen.add(loop.trace)
    return len(seen), failed
