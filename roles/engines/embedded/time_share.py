"""A bounded share of the compute thread for work that runs beside the engine of the training.

Owns the pace: when the next turn of that work may begin. Owns neither the thread nor the work.

    share 0.25:   | turn 20 ms | at least 60 ms of the others | turn 20 ms | ...      while the others have work
                  | turn 20 ms | turn 20 ms | turn 20 ms | ...                        while they have none

Invariant: after a turn of t seconds the next one begins t * (1 / share - 1) seconds later at the earliest, unless nobody else
wants the thread: `busy` says no, and the turn had not to wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

_QUEUED_S = 0.001
"""A turn that began so long after it was asked for waited for somebody else on the thread."""


class Share:
    """`compute` as an engine takes it, paced."""

    def __init__(
        self,
        compute: Callable[..., Awaitable[Any]],
        share: float,
        busy: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._compute = compute
        self._others = 1 / share - 1  # seconds of the others for each second of ours
        self._busy = busy
        self._clock = clock
        self._sleep = sleep
        self._earliest = -float("inf")
        self._queued = False

    async def compute(self, function: Callable[[], Any]) -> Any:
        """Runs the function on the compute thread when its time has come."""
        early_s = self._earliest - self._clock()
        if early_s > 0 and (self._queued or self._busy()):
            await self._sleep(early_s)
        asked = self._clock()
        began, ended, result = await self._compute(self._timed, function)
        self._queued = began - asked > _QUEUED_S
        self._earliest = ended + (ended - began) * self._others
        return result

    def _timed(self, function: Callable[[], Any]) -> tuple[float, float, Any]:
        began = self._clock()
        result = function()
        return began, self._clock(), result
