"""Who speaks on the bus, and how: one rank of one incarnation, and its requests.

Owns the repetition of requests while the process that answers them is away, or has nothing to say yet. Knows no request.

    call = Calls(Member("rollout-0", 1, 0, 1, 0), coordinator)
    await call("lease", 4, [])

Invariant: a request is idempotent by its own key, so the answer of a repeated one is that of the first.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import NotYet
from rondo.runtime.waits import PROCESS, waiting


@dataclass(frozen=True, slots=True)
class Member:
    """Who speaks: one rank of one incarnation of a role group."""

    group: str
    incarnation: int
    rank: int
    world_size: int
    attempt: int


class Calls:
    """Requests as this member to the actor that `ref` refers to."""

    def __init__(self, member: Member, ref: ActorRef) -> None:
        self.member = member
        self.held_up_at = -math.inf
        """When the other side last said that it must wait itself, on the clock of waits."""
        self._ref = ref

    async def __call__(self, method: str, *args: Any, deadline_s: float = 60.0, **kwargs: Any) -> Any:
        """An idempotent request, repeated over restarts of the other side until the deadline, and without one while it lives and
        has no answer yet."""
        who = (self.member.group, self.member.incarnation)
        while True:
            try:
                return await self._ref.call(method, *who, *args, deadline_s=deadline_s, retry=True, **kwargs)
            except NotYet as answer:
                if answer.after_s:
                    self.held_up_at = PROCESS.clock()
                    async with waiting(f"call {method}", peer=f"{self._ref.peer}: {answer}", deadline_s=None):
                        await asyncio.sleep(answer.after_s)
