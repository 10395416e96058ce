"""Announcer: tells the coordinator what happens to role groups, in order, over its own restarts.

Owns the queue of messages. Does not own the truth: a coordinator that starts asks the supervisor for its roster, so a
message that is lost with a dead coordinator, or arrives twice, does no harm.

    announcer.tell("member_started", "rollout-0", 2, 1)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import RondoError

_DEADLINE_S = 60.0


class Announcer:
    """Messages to one actor. `on_failure` hears of a message that could not be delivered."""

    def __init__(self, coordinator: ActorRef, on_failure: Callable[[str, Exception], None]) -> None:
        self._coordinator = coordinator
        self._on_failure = on_failure
        self._messages: asyncio.Queue[tuple[str, tuple[Any, ...]]] = asyncio.Queue()
        self._delivery: asyncio.Task[Any] | None = None

    def tell(self, method: str, *arguments: Any) -> None:
        """Queues a message and returns at once."""
        self._messages.put_nowait((method, arguments))

    def clear(self) -> None:
        """Forgets what is not delivered: it belongs to an attempt that is over."""
        while not self._messages.empty():
            self._messages.get_nowait()
        if self._delivery is not None:
            self._delivery.cancel()

    async def run(self) -> None:
        """Delivers until it is cancelled."""
        while True:
            method, arguments = await self._messages.get()
            call = self._coordinator.call(method, *arguments, deadline_s=_DEADLINE_S, retry=True)
            self._delivery = asyncio.ensure_future(call)
            try:
                await asyncio.wait([self._delivery])
            finally:
                self._delivery.cancel()
            if not self._delivery.cancelled():
                error = self._delivery.exception()
                if isinstance(error, (RondoError, ValueError, KeyError, TypeError)):  # what the coordinator may answer
                    self._on_failure(method, error)
                elif error is not None:
                    raise error
