"""Equal servers, any of which may be asked: who is asked next, and what becomes of one that fails.

Owns how many calls are out at a time, and that a call goes elsewhere, or is made again, until its deadline. Does not own what is
asked (`scoring_servers.py`, `rewards/genrm.py`), nor HTTP (`sglang/client.py`).

    servers = EqualServers(lambda: clients, what="teacher", num_calls=64, deadline_s=3600)
    answer = await servers.ask(lambda client: client.post("/generate", body, deadline_s=300))

Invariant: a call ends with an answer, with ConfigError where a server refuses it, or with PeerGone where none answers in time,
also while it waits for room. A server that fails for itself, or for a moment, is asked again, and the others meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
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
    it has not failed at since all have had it. `num_calls` are made at a time, the others wait. `what` they are, for messages.
    `settings` name them: a call that one refuses for its key, path or model ends at once. None: they come and go, and whoever
    listens where one was says nothing of the others."""

    def __init__(
        self,
        clients: Callable[[], Sequence[SGLangClient]],
        *,
        what: str,
        num_calls: int,
        deadline_s: float,
        settings: str | None = None,
    ) -> None:
        self._clients, self._what, self._deadline_s, self._settings = clients, what, deadline_s, settings
        self._room = asyncio.Semaphore(num_calls)
        self._answered, self._last = 0.0, "nothing"
        """When one of them last took a call, on the monotonic clock, and what the last one that did not said."""
        self._busy = Counter[SGLangClient]()
        self.num_waiting = self.num_failed = 0
        """Calls that wait for room now; tries that failed until now."""

    @property
    def num_busy(self) -> int:
        """Calls that are at a server now."""
        return self._busy.total()

    async def ask(self, call: Callable[[SGLangClient], Awaitable[T]], *, seed: str = "") -> T:
        """What `call` returns for one of them. `seed`: of the pauses between its tries, so that many do not come at once."""
        began, peer = time.monotonic(), ", ".join(client.url for client in self._clients()) or self._what
        try:
            await self._enter(peer)
            try:
                # Where none answers, who waited for room until now has no more time than who was asking.
                left_s = max(began, self._answered) + self._deadline_s - time.monotonic()
                async with waiting(self._what, peer=peer, deadline_s=left_s):
                    return await self._asked(call, random.Random(seed))
            finally:
                self._room.release()
        except DeadlineExceeded as error:
            raise PeerGone(
                f"a {self._what} must answer within {self._deadline_s:g} s, got at last: {self._last}. See {peer}"
            ) from error

    async def _enter(self, peer: str) -> None:
        """Waits for room, as long as others are answered."""
        self.num_waiting += 1
        try:
            name, moved = f"room at a {self._what}", lambda: self._answered
            async with waiting(name, peer=peer, deadline_s=self._deadline_s, moved=moved):
                await self._room.acquire()
        finally:
            self.num_waiting -= 1

    async def _asked(self, call: Callable[[SGLangClient], Awaitable[T]], draw: random.Random) -> T:
        pause_s, tried = _PAUSE_S, set[SGLangClient]()
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
                    found = await self._call(client, call)
                    self._answered = time.monotonic()
                    return found
                except DeadlineExceeded as error:
                    self._last = str(error)
                except RondoError as error:
                    self._refused(error)
                    self._last = str(error)
                self.num_failed += 1
            await asyncio.sleep(pause_s * draw.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _refused(self, error: RondoError) -> None:
        """Raises ConfigError where asking again would change nothing."""
        fault = fault_of(error)
        if fault == "request":
            self._answered = time.monotonic()
            raise ConfigError(f"a {self._what} must take what it is asked, got: {error}") from error
        if fault == "engine" and hasattr(error, "status") and self._settings is not None:
            raise ConfigError(
                f"a {self._what} must be where the settings say, with that key and model, got: {error}. Correct {self._settings}"
            ) from error

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
