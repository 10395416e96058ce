"""Whose turn it is on the compute thread of a process that trains and scores.

Owns when a scoring role may compute beside the trainer of its process. Owns neither the thread nor any work on it; where a
process has no trainer, everyone may at any time.

    trainer   wait for a round | round | round | wait      | round | optimizer | wait for the commit
    scoring   ..micro-batch... |               | micro-batch...   |           | micro-batch

Invariant: a micro-batch begins to be scored only while the trainer waits, and one at a time over all scoring roles; so work that
comes to the trainer waits for one of them at most. Nothing starves: what a step still lacks is scored while the trainer waits
for it, and a step ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


class Turns:
    """Used on the event loop of one process."""

    def __init__(self) -> None:
        self._waits = asyncio.Event()
        self._waits.set()
        self._one = asyncio.Lock()
        self.make_room: Callable[[], Awaitable[object]] = _nothing
        """Awaited before a round is trained: what generates in turn with the training gives its memory."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer works, but where it says that it waits."""
        self._waits.clear()
        try:
            yield
        finally:
            self._waits.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer waits for others; then it works again, if it did before."""
        worked = not self._waits.is_set()
        self._waits.set()
        try:
            yield
        finally:
            if worked:
                self._waits.clear()

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """The body computes one micro-batch, in the trainer's next wait."""
        async with self._one:
            while not self._waits.is_set():  # what wakes us may be over by now
                await self._waits.wait()
            yield


async def _nothing() -> None:
    """Nobody has anything to give."""
