"""What the leader of a run asks a rollout process about its engines: which there are, one more, one less.

Owns these endpoints. Does not own the engines (`replica.py`), nor which process is asked for an address (the leader).
"""

from __future__ import annotations

from typing import Any

from rondo.roles.engines.replica import Replica
from rondo.runtime.actors.actor import Actor, endpoint


class EngineCalls(Actor):
    """Of one rollout process, from its first proved weights on."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @endpoint
    async def engines(self) -> list[dict[str, Any]]:
        """As `Replica.engines`."""
        return self._replica.engines()

    @endpoint
    async def attach_engine(self, url: str, within_s: float) -> bool:
        """As `AttachedServers.attach`; a call that is cancelled, or whose caller ends, undoes it."""
        return await self._replica.attached.attach(url, deadline_s=within_s)

    @endpoint
    async def detach_engine(self, url: str, drain_s: float) -> bool:
        """As `AttachedServers.detach`."""
        return await self._replica.attached.detach(url, drain_s=drain_s)
