"""Equal servers, any of which may be asked: who is asked next, and what becomes of one that fails.

Owns how many calls are out at a time, and that a call goes elsewhere, or is made again, until its deadline. Does not own what is
asked (`scoring_servers.py`, `rewards/genrm.py`), nor HTTP (`sglang/client.py`).

    servers = EqualServers(lambda: clients, what="teacher", num_calls=64, deadline_s=3600)
    answer = await servers.ask(lambda client: client.post("/generate", body, deadline_s=300))

Invariant: a call ends with an answer, with ConfigError where a server refuses it, or with PeerGone where none answers in time. A
server that fails for itself, or for a moment, is asked again, and the others meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rondo.roles.engines.faults import fault_of
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.runtime.errors import ConfigError, DeadlineExceeded, PeerGone, ProtocolError, RondoError
from rondo.runtime.waits import waiting

T = TypeVar("T")
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class EqualServers:
    """`clients` are those that are there now, as far as is known; a call goes to the one with the fewest under way, of those that
    it has not failed at since all have had it. `num_calls` are made at a time, the others wait. `what` they are, for messages."""

    def __init__(
        self, clients: Callable[[], Sequence[SGLangClient]], *, what: str, num_calls: int, deadline_s: float
    ) -> None:
        self._clients, self._what, self._deadline_s = clients, what, deadline_s
        self._room = asyncio.Semaphore(num_calls)
        self._busy = Counter[SGLangClient]()
        self.num_waiting = self.num_failed = 0
        """Calls that wait for room now; tries that failed until now."""

    @property
    def num_busy(self) -> int:
        """Calls that are at a server now."""
        return self._busy.total()

    async def ask(self, call: Callable[[SGLangClient], Awaitable[T]]) -> T:
        """What `call` returns for one of them."""
        pause_s, last, tried = _PAUSE_S, "no server", set[SGLangClient]()
        peer = ", ".join(client.url for client in self._clients()) or self._what
        self.num_waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.num_waiting -= 1
        try:
            async with waiting(self._what, peer=peer, deadline_s=self._deadline_s):
                while True:
                    every = self._clients()
                    # One that is gone fails at once, and so has the fewest under way.
                    left = [client for client in every if client not in tried]
                    if not left:
                        left, tried = list(every), set()
                    if left:
                        client = min(left, key=lambda each: self._busy[each])
                        tried.add(client)
                        try:
                            return await self._call(client, call)
                        except DeadlineExceeded as error:
                            last = str(error)
                        except RondoError as error:
                            if fault_of(error) == "request":
                                raise ConfigError(f"a {self._what} must take what it is asked, got: {error}") from error
                            last = str(error)
                        self.num_failed += 1
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except DeadlineExceeded as error:
            raise PeerGone(
                f"a {self._what} must answer within {self._deadline_s:g} s, got at last: {last}. See {peer}"
            ) from error
        finally:
            self._room.release()

    async def _call(self, client: SGLangClient, call: Callable[[SGLangClient], Awaitable[T]]) -> T:
        self._busy[client] += 1
        try:
            return await call(client)
        finally:
            self._busy[client] -= 1


async def first_model(client: SGLangClient, *, deadline_s: float, setting: str) -> str:
    """Of those that a server says it serves. `setting`: where another could be named."""
    told: Any = await client.get("/v1/models", deadline_s=deadline_s)
    try:
        return str(told["data"][0]["id"])
    except (IndexError, KeyError, TypeError) as error:
        raise ProtocolError(
            f"the server {client.url} must answer /v1/models with a model that it serves, got {told!s:.200}. Name it in {setting}"
        ) from error
