"""Whose turn it is on the compute thread of a process that trains and scores.

Owns when a scoring role may compute beside the trainer of its process. Owns neither the thread nor any work on it; where a
process has no trainer, everyone may at any time. Of several ranks whose models are cut over them, all take their turns in the
order of the first one (`turn_order.py`).

    trainer   wait for a round | round | round | wait      | round | optimizer | wait for the commit
    scoring   ..micro-batch... |               | micro-batch...   |           | micro-batch

Invariant: a micro-batch begins to be scored only while the trainer waits, and one at a time over all scoring roles; so work that
comes to the trainer waits for one of them at most. Nothing starves: what a step still lacks is scored while the trainer waits
for it, and a step ends. Whoever has a turn hands its work to the thread before anything else happens on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from rondo.roles.training.turn_order import TurnsFollowed, TurnsTold

_TRAINER = "the trainer"


class Turns:
    """Used on the event loop of one process. `order`: with the other ranks of its group."""

    def __init__(self, order: TurnsTold | TurnsFollowed | None = None) -> None:
        self._told = order if isinstance(order, TurnsTold) else None
        self._followed = order if isinstance(order, TurnsFollowed) else None
        self._waits = asyncio.Event()
        self._waits.set()
        self._one = asyncio.Lock()
        self.make_room: Callable[[], Awaitable[object]] = _nothing
        """Awaited before a round is trained: what generates in turn with the training gives its memory."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer works, but where it says that it waits."""
        await self._go_on()
        try:
            yield
        finally:
            self._rest()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The trainer waits for others; then it works again, if it did before."""
        worked = not self._waits.is_set()
        self._rest()
        yield
        if worked:
            await self._go_on()

    async def _go_on(self) -> None:
        if self._followed is not None:
            await self._followed.take(_TRAINER)
        self._waits.clear()
        if self._told is not None:
            self._told.tell(_TRAINER, None)

    def _rest(self) -> None:
        if self._followed is not None and not self._waits.is_set():
            self._followed.done()
        self._waits.set()

    @asynccontextmanager
    async def scoring(self, name: str, said: Any = None) -> AsyncIterator[Any]:
        """The body computes one micro-batch, in the trainer's next wait. `name`: whose, the same on every rank. Gives what the
        first rank says, JSON-able: the same to all ranks."""
        if self._followed is not None:
            said = await self._followed.take(name)
            try:
                yield said
            finally:
                self._followed.done()
            return
        async with self._one:
            while not self._waits.is_set():  # what wakes us may be over by now
                await self._waits.wait()
            if self._told is not None:
                self._told.tell(name, said)
            yield said


async def _nothing() -> None:
    """Nobody has anything to give."""
