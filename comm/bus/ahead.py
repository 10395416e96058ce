"""A round that is asked for before it is needed, so that its rows are there when the work before it ends.

Owns the one request of a train stream that is on its way, and what becomes of it. Does not own rounds (`rounds.py`) or what they
view (`bus.py`).

    ask(3, 1)      while round 0 of step 3 is trained: waits at the coordinator for a full micro-batch, or for all that is left
    take(3, 1)     now it is needed: what has come, or, once the coordinator is told so, whatever is ready

Invariant: asking ahead never makes a round smaller than it would be, and never another one: rounds are journalled by their key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Place = tuple[int, int]
"""Step, and index of the round in it."""


class Ahead(Generic[T]):
    """`request(step, index, early)` gets a round, or None where no more come; `early`: nobody waits for it yet, until
    `hurry(step, index)` says so, which returns when the round is there."""

    def __init__(
        self, request: Callable[[int, int, bool], Awaitable[T]], hurry: Callable[[int, int], Awaitable[object]]
    ) -> None:
        self._request = request
        self._hurry = hurry
        self._place: Place | None = None
        self._asked: asyncio.Task[T] | None = None
        self._sent = False  # what was asked for; the loop has not turned since then, where it is not

    def ask(self, step: int, index: int) -> None:
        """Ask for a round that comes to be needed. Another one that was asked for is forgotten."""
        self.drop()
        self._place, self._sent = (step, index), False
        self._asked = asyncio.create_task(self._of(step, index), name="round ahead")

    async def take(self, step: int, index: int) -> T:
        """The round, needed now. Raises what asking for it raised."""
        asked = self._asked
        if asked is None or self._place != (step, index) or not self._sent:
            self.drop()
            return await self._request(step, index, False)
        try:
            if not asked.done():
                hurrying = asyncio.create_task(self._told(step, index), name="round")
                try:
                    await asyncio.wait({asked, hurrying}, return_when=asyncio.FIRST_COMPLETED)
                    if not asked.done():
                        hurrying.result()
                        await asyncio.wait({asked})
                finally:
                    _forget(hurrying)
            return asked.result()
        finally:
            self.drop()

    def drop(self) -> None:
        """Ask for nothing any more."""
        if self._asked is not None:
            _forget(self._asked)
        self._asked = self._place = None

    async def _of(self, step: int, index: int) -> T:
        self._sent = True
        return await self._request(step, index, True)

    async def _told(self, step: int, index: int) -> None:
        await self._hurry(step, index)


def _forget(task: asyncio.Task[Any]) -> None:
    """End a request whose answer nobody will look at. An error that it ended with is met again by whoever asks next."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
