"""Servers that leave, hang, or do not start, again and again, without one: nobody is given up, and nobody else is harmed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, cast

import pytest

from rondo.roles.engines.engine import EngineStats
from rondo.roles.engines.sglang.restarts import KeptEngine, kept
from rondo.runtime.errors import ConfigError, DeadlineExceeded, PeerGone, WorkerDied
from rondo.runtime.processes.process import TICKS_PER_S, Stat
from rondo.runtime.waits import pending
from tests.roles.engines.sglang.test_one_server import FOUND

SILENT_S = 300.0
LOOK_S = 5.0


class Under:
    """What is behind a kept engine, as far as keeping goes."""

    def __init__(self) -> None:
        self.asleep, self.version = False, 1
        self.num_running = self.num_made = 0
        self.wake: Any = None
        self.closed_with: Exception | None = None
        self.given: list[int] = []
        self.updating, self.closed = asyncio.Event(), asyncio.Event()
        self.capabilities, self.client = FOUND, Client()

    def stats(self) -> EngineStats:
        return EngineStats(1, 8, self.num_running, 0, self.num_made, 0, self.num_made, 0, 0, 0)

    async def ready(self) -> bool:
        return True

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Of a server with a scheduler that is stuck it never ends, nor does leaving it, until the server is of no use."""
        self.given.append(version)
        if self.client.frozen:
            self.updating.set()
            try:
                await asyncio.Event().wait()
            finally:
                await self.closed.wait()

    async def close(self, why: Exception | None = None) -> None:
        self.closed_with = why
        self.closed.set()


class Rig:
    """A kept engine whose every start is one of `starts`: an error, or what is there then. Its pauses take no time, and its looks
    as much as the clock is told to pass in each."""

    def __init__(self, name: str, *starts: Exception | Under) -> None:
        self.name = name
        self.starts = deque(starts)
        self.pauses: list[float] = []
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.now = 0.0
        self.computes, self.state = False, "S"
        self.look = asyncio.Event()
        self.leaves: asyncio.Future[str] | None = None
        self.engine = KeptEngine(
            self, self._connect, newest=cast(Any, None), deadline_s=1.0, silent_s=SILENT_S, tell=self._tell,
            clock=lambda: self.now, sleep=self._sleep,
        )  # fmt: skip

    async def start(self, deadline_s: float) -> Any:
        return Client()

    async def _connect(self, client: Any) -> Any:
        self.leaves = None
        found = self.starts.popleft() if len(self.starts) > 1 else self.starts[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def gone(self) -> str:
        self.leaves = asyncio.get_running_loop().create_future()
        return await self.leaves

    def workers(self) -> Mapping[int, Stat]:
        """All the time that passes, where it computes."""
        ticks = int(self.now * TICKS_PER_S) if self.computes else 1
        return {4711: Stat(4711, self.state, 1, 1, ticks, 1, 0, 0)}

    async def close(self) -> None:
        return

    async def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        self.told.append((kind, data))

    async def _sleep(self, seconds: float) -> None:
        if seconds == LOOK_S:
            await self.look.wait()
            self.now += seconds
        else:
            self.pauses.append(seconds)
            self.now += seconds
        await asyncio.sleep(0)

    async def until(self, num_told: int, kind: str = "sglang_gone") -> None:
        while [told for told, _ in self.told].count(kind) < num_told:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def leave(self) -> None:
        while self.leaves is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.leaves.set_result("killed by SIGKILL")

    async def looks(self, seconds: float) -> None:
        """Until the clock has come so far."""
        until = self.now + seconds
        self.look.set()
        while self.now < until:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.look.clear()


class Client:
    """`deaf`: nobody answers it; `frozen`: nobody but who speaks HTTP does. That takes all of the time, on `clock`."""

    num_heard, deaf, frozen = 0, False, False
    clock: Rig | None = None

    async def get(self, path: str, *, deadline_s: float) -> None:
        if self.deaf:
            raise PeerGone("planted")
        if self.frozen and path == "/server_info":
            assert self.clock is not None
            self.clock.now += deadline_s
            raise DeadlineExceeded("planted", "here", "there", deadline_s)
        self.num_heard += 1

    async def __aexit__(self, *_: object) -> None:
        return


@pytest.fixture(autouse=True)
async def in_time() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


@asynccontextmanager
async def lasting(*rigs: Rig) -> AsyncIterator[None]:
    async with kept([rig.engine for rig in rigs]):
        yield


async def test_a_server_that_cannot_be_restarted_is_tried_with_growing_pauses_and_ends_no_other() -> None:
    died = [
        WorkerDied("no such file"),
        OSError("no room"),
        PeerGone("left"),
        KeyError("dtype"),
        *[WorkerDied("no such file")] * 6,
    ]
    first, last = Under(), Under()
    bad, good = Rig("bad", first, *died, last), Rig("good", Under())
    async with lasting(bad, good):
        first.num_made = 3  # it has finished requests: the next one is there at once
        await bad.leave()
        await bad.until(6)
        with pytest.raises(PeerGone, match="the SGLang server bad must be there, got it did not start: no such file"):
            await bad.engine.ready()
        assert first.closed_with is not None and await good.engine.ready()
        await bad.until(2, "sglang")
        assert await bad.engine.ready() and bad.engine.engine is last
        assert bad.pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
        gone = [data for kind, data in bad.told if kind == "sglang_gone"]
        assert gone[0] == {"server": "bad", "why": "killed by SIGKILL", "in_a_row": 1, "again_in_s": 0.0}
        assert gone[-1] | {"in_a_row": 11, "again_in_s": 60.0} == gone[-1]
        last.num_made = 1
        await bad.leave()
        await bad.until(3, "sglang")
        assert bad.pauses[-1] == 0.0
    assert good.told == [("sglang", {"server": "good", **asdict(FOUND)})] and len(bad.told) == 2 + 12 + 1


async def test_a_server_that_is_away_is_listed_among_the_waits_with_the_reason() -> None:
    rig = Rig("away", Under(), Under())

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(3600)

    rig.engine._sleep = sleep
    async with lasting(rig):
        await rig.leave()
        await rig.until(1)
        await asyncio.sleep(0)
        assert "away (killed by SIGKILL)" in [wait.peer for wait in pending() if wait.name == "next sglang"]


async def test_the_first_starts_fail_alone_and_end_it_where_there_is_none_at_all() -> None:
    slow = Rig("slow", WorkerDied("planted"), Under())
    async with lasting(slow, Rig("good", Under())):
        await slow.until(1, "sglang")
        assert await slow.engine.ready() and slow.pauses == [0.0]
    with pytest.raises(WorkerDied, match="planted"):
        async with lasting(Rig("a", WorkerDied("planted")), Rig("b", PeerGone("too"))):
            pass
    with pytest.raises(ExceptionGroup) as raised:
        async with lasting(Rig("a", ConfigError("too old")), Rig("b", Under())):
            pass
    assert raised.group_contains(ConfigError, match="too old")


async def test_a_server_that_has_requests_and_makes_no_token_is_started_again() -> None:
    hangs, next_one = Under(), Under()
    rig = Rig("hangs", hangs, next_one)
    async with lasting(rig):
        hangs.num_running, hangs.num_made = 4, 10
        await rig.looks(10)
        for _ in range(5):  # slow is not silent
            hangs.num_made += 1
            await rig.looks(SILENT_S - 20)
        assert len(rig.told) == 1
        await rig.looks(SILENT_S + 20)
        await rig.until(2, "sglang")
        assert rig.told[1][1]["why"] == "it was silent for 300 s" and rig.engine.engine is next_one
        assert "must stay, got it was silent for 300 s" in str(hangs.closed_with)


async def test_a_server_whose_scheduler_answers_nothing_and_computes_nothing_is_started_again_with_requests_or_without() -> (
    None
):
    for num_running in (0, 4):
        frozen, next_one = Under(), Under()
        rig = Rig("frozen", frozen, next_one)
        async with lasting(rig):
            frozen.num_running, frozen.client.clock = num_running, rig
            await rig.looks(10)
            frozen.client.frozen = True
            await rig.looks(30)
            await rig.until(2, "sglang")
            assert "got its scheduler answered nothing for 10.0 s" in str(frozen.closed_with)


async def test_a_scheduler_that_answers_nothing_has_longer_while_it_computes_and_is_not_asked_asleep_or_in_an_update() -> (
    None
):
    frozen, next_one = Under(), Under()
    rig = Rig("computes", frozen, next_one)
    async with lasting(rig):
        await rig.looks(3 * SILENT_S)
        frozen.client.frozen, frozen.client.clock, frozen.asleep = True, rig, True
        await rig.looks(3 * SILENT_S)
        frozen.asleep = False
        async with rig.engine._updating:
            await rig.looks(3 * SILENT_S)
            rig.computes = True
        await rig.looks(SILENT_S - 20)
        assert len(rig.told) == 1
        await rig.looks(40)
        await rig.until(2, "sglang")
        assert "got it was silent for 300 s" in str(frozen.closed_with)


async def test_a_server_that_answers_nothing_is_ended_in_an_update_too() -> None:
    deaf, next_one = Under(), Under()
    rig = Rig("deaf", deaf, next_one)
    async with lasting(rig), rig.engine._updating:
        await rig.looks(3 * SILENT_S)
        assert len(rig.told) == 1
        deaf.client.deaf = True
        await rig.looks(20)
        await rig.until(2, "sglang")
        assert rig.engine.engine is next_one and "got it answered nothing for " in str(deaf.closed_with)


async def test_a_server_whose_scheduler_is_stopped_is_ended_in_an_update_too() -> None:
    stopped, next_one = Under(), Under()
    rig = Rig("stopped", stopped, next_one)
    async with lasting(rig), rig.engine._updating:
        await rig.looks(3 * SILENT_S)
        assert len(rig.told) == 1
        rig.state = "T"
        await rig.looks(10)
        await rig.until(2, "sglang")
        assert rig.engine.engine is next_one
        assert "got a stopped process of it answered nothing for 5.0 s" in str(stopped.closed_with)


async def test_a_scheduler_that_an_update_leaves_stuck_is_ended_from_the_updates_limit_on() -> None:
    stuck, next_one = Under(), Under()
    rig = Rig("stuck", stuck, next_one)
    async with lasting(rig):
        stuck.client.frozen, stuck.client.clock = True, rig
        giving = asyncio.create_task(rig.engine.update_weights(7, {}))
        await stuck.updating.wait()
        await rig.looks(3 * SILENT_S)
        assert len(rig.told) == 1  # its time is that of the update
        giving.cancel()
        await rig.looks(30)
        await rig.until(2, "sglang")
        assert rig.told[1][1]["why"] == "its scheduler answered nothing for 10.0 s after an update that failed"
        with pytest.raises(asyncio.CancelledError):
            await giving
        await rig.engine.update_weights(7, {})
        assert (stuck.given, next_one.given) == ([7], [7])


async def test_after_an_update_that_failed_a_server_is_sent_another_one_once_its_scheduler_answers() -> None:
    under = Under()
    rig = Rig("slow", under)
    async with lasting(rig):
        under.client.frozen, under.client.clock = True, rig
        giving = asyncio.create_task(rig.engine.update_weights(7, {}))
        await under.updating.wait()
        under.closed.set()
        giving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await giving
        with pytest.raises(
            PeerGone, match="scheduler of the SGLang server slow must answer after an update that failed"
        ):
            await rig.engine.update_weights(8, {})
        under.client.frozen = False
        await rig.engine.update_weights(9, {})
        assert under.given == [7, 9]
