"""Equal servers: how long a call waits for room at them, in an outage and without one."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from rondo.roles.engines.equal_servers import EqualServers
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.runtime.errors import PeerGone
from rondo.runtime.waits import pending

SERVER = SGLangClient("http://127.0.0.1:1")


def servers(deadline_s: float) -> EqualServers:
    return EqualServers(lambda: [SERVER], what="judge", num_calls=1, deadline_s=deadline_s)


class Holder:
    """A call that keeps its room until it is let go, also past its own deadline."""

    def __init__(self, judges: EqualServers) -> None:
        self._let_go, self._inside = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(judges.ask(self._hold))

    async def _hold(self, _: SGLangClient) -> None:
        self._inside.set()
        while not self._let_go.is_set():
            with suppress(asyncio.CancelledError):
                await self._let_go.wait()

    async def __aenter__(self) -> Holder:
        await self._inside.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._let_go.set()
        await asyncio.gather(self._task, return_exceptions=True)


async def answers(_: SGLangClient) -> str:
    return "yes"


async def test_a_call_that_waits_for_room_is_listed_and_ends_in_time_where_nobody_is_answered() -> None:
    judges = servers(0.05)
    async with Holder(judges):
        waits = asyncio.create_task(judges.ask(answers))
        await asyncio.sleep(0)
        assert ("room at a judge", SERVER.url) in {(each.name, each.peer) for each in pending()}
        with pytest.raises(PeerGone, match=r"a judge must answer within 0\.05 s, got at last: nothing"):
            await asyncio.wait_for(waits, 60)
    assert judges.num_waiting == 0 and await judges.ask(answers) == "yes"


async def test_a_call_waits_for_room_as_long_as_others_are_answered() -> None:
    judges = servers(0.05)
    async with Holder(judges):
        judges._answered = time.monotonic() + 3600  # as if somebody were answered all the time
        waits = asyncio.create_task(judges.ask(answers))
        await asyncio.wait([waits], timeout=0.2)
        assert not waits.done()
    assert await waits == "yes"
