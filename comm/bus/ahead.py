"""A round that is asked for before it is needed, so that its rows are there when the work before it ends.

Owns the one request of a train stream that is on its way, and what becomes of it. Does not own rounds (`rounds.py`) or what they
view (`bus.py`).

    ask(3, 1)      while round 0 of step 3 is trained: waits at the coordinator for a full micro-batch, or for all that is left
    take(3, 1)     now it is needed: what has come, or, asked for once more and not early, whatever is ready

Invariant: asking ahead never makes a round smaller than it would be, and never another one: rounds are journalled by their key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """`request(step, index, early)` gets a round, or None where no more come; `early`: nobody waits for it yet."""

    def __init__(self, request: Callable[[int, int, bool], Awaitable[T]]) -> None:
        self._request = request
        self._asked: asyncio.Task[T] | None = None
        self._place = (-1, -1)  # step, and index of the round in it
        self._came = False

    def ask(self, step: int, index: int, prepare: Callable[[T], Awaitable[None]] | None = None) -> None:
        """Ask for a round that comes to be needed, and `prepare` it once it has come. Another one that was asked for is
        forgotten."""
        self.drop()
        self._place, self._came = (step, index), False
        self._asked = asyncio.create_task(self._early(step, index, prepare), name="round ahead")

    async def take(self, step: int, index: int) -> T:
        """The round, needed now. Raises what asking for it raised."""
        asked = self._asked
        if asked is not None and self._place == (step, index) and (self._came or asked.done()):
            self._asked = None
            return await asked
        self.drop()
        return await self._request(step, index, False)

    def drop(self) -> None:
        """Ask for nothing any more."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()
            # An error that it ended with is met again by whoever asks next.
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _early(self, step: int, index: int, prepare: Callable[[T], Awaitable[None]] | None) -> T:
        made = await self._request(step, index, True)
        self._came = True
        if made is not None and prepare is not None:
            await prepare(made)
        return made
