from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rondo.roles.engines.engine import Engine, Prefix, Request, SamplingParams
from rondo.roles.engines.faults import NotThere
from rondo.roles.engines.sglang.capabilities import probe
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.roles.engines.sglang.open import one_engine
from rondo.roles.engines.sglang.restarts import KeptEngine, kept
from rondo.roles.engines.sglang.server import SGLangServer
from rondo.runtime.errors import Closed, CorruptData, PeerGone
from rondo.runtime.waits import waiting
from tests.roles.engines.sglang.pretender import launch

DEADLINE_S = 60.0


class Named:
    """Weights that are a name alone."""

    proof = None

    def __init__(self, client: SGLangClient, rig: Rig) -> None:
        self._client, self._rig = client, rig
        self.asleep = False

    async def release(self) -> None:
        self.asleep = True
        self._rig.hold.touch()

    async def open(self) -> None:
        return

    async def update(self, version: int, tensors: Mapping[str, Any]) -> None:
        if self._rig.fails:
            self._rig.fails -= 1
            raise CorruptData("planted")
        if self._rig.stops_in_update:
            self._rig.stops_in_update -= 1
            self._rig.stop()
        if self._rig.kills_in_update and self._rig.server.pid is not None:
            self._rig.kills_in_update -= 1
            self._rig.kill()
        await self._client.post("/update_weight_version", {"new_version": str(version)}, deadline_s=DEADLINE_S)
        self._rig.given.append(version)
        if self.asleep:
            self.asleep = False
            self._rig.hold.unlink()

    async def close(self) -> None:
        return


class Rig:
    """A kept engine over a pretender, and what is told of it. While `hold` is there, it makes no token; a kill takes it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.hold = folder / "hold"
        how = launch(folder, PRETEND_HOLD=str(self.hold))
        self.server = SGLangServer(how, log=folder / "log", folder=folder, name=folder.name, grace_s=0.2)
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.given: list[int] = []
        self.newest: int | None = None
        self.stopped: int | None = None
        self.looks = asyncio.Event()
        """Before something is stopped nobody looks, so that no busy machine is taken for a server that is of no use."""
        self.kills_in_update = self.stops_in_update = self.deaths_at_start = self.fails = 0
        self.left, self.came = asyncio.Event(), asyncio.Event()
        self.engine = KeptEngine(
            self.server, self._connect, newest=self.newest_weights, deadline_s=DEADLINE_S, silent_s=DEADLINE_S,
            tell=self._tell, sleep=self._sleep,
        )  # fmt: skip

    async def _connect(self, client: SGLangClient) -> SGLangEngine:
        if self.deaths_at_start:
            self.deaths_at_start -= 1
            self.kill()
            raise PeerGone("planted")
        ask = client.get

        async def get(path: str, *, deadline_s: float | None) -> Any:
            """Who looks is patient with a server that runs, and not with one that was stopped."""
            return await ask(path, deadline_s=0.05 if self.stopped == self.server.pid else DEADLINE_S)

        client.get = get  # type: ignore[method-assign]
        return SGLangEngine(client, weights=Named(client, self), pause="in_place", capabilities=await probe(client))

    @asynccontextmanager
    async def newest_weights(self) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        if self.newest is None:
            raise Closed("the run is over")
        yield self.newest, {}

    async def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        self.told.append((kind, data))
        if kind == "sglang_gone":
            self.left.set()
        if kind == "sglang_back":
            self.came.set()

    def stop(self) -> None:
        assert self.server.pid is not None
        self.stopped = self.server.pid
        os.kill(self.stopped, signal.SIGSTOP)
        # Until the kernel has stopped the last of its threads, which takes a moment where the machine is busy, others answer.
        os.waitid(os.P_PID, self.stopped, os.WSTOPPED)
        self.looks.set()

    async def _sleep(self, seconds: float) -> None:
        """A pause before a start, or between two looks: as good as none."""
        if seconds not in (0.0, 1.0, 2.0, 4.0):
            await self.looks.wait()
            await asyncio.sleep(0.02)

    def kill(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)
        self.hold.unlink(missing_ok=True)


@asynccontextmanager
async def dispatched(rig: Rig) -> AsyncIterator[Engine]:
    """The only engine of a run, as the run has it."""
    async with AsyncExitStack() as ends:
        engine = one_engine([rig.engine], newest=rig.newest_weights)
        ends.push_async_callback(engine.close)
        await ends.enter_async_context(kept([rig.engine]))
        yield engine


def request(name: str, num: int = 5) -> Request:
    return Request(name, np.array([1, 2], np.int32), SamplingParams(num), seed=1)


async def there(rig: Rig) -> None:
    async with waiting("a server", peer="server", deadline_s=DEADLINE_S):
        while rig.engine.engine is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def in_flight(rig: Rig) -> None:
    async with waiting("a request in flight", peer="server", deadline_s=DEADLINE_S):
        while rig.engine.stats().num_running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_request_that_a_server_takes_with_it_is_asked_of_the_next_one_under_the_newest_weights(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    async with dispatched(rig) as engine:
        await engine.update_weights(4, {})
        rig.newest = 5
        rig.hold.touch()
        asking = asyncio.create_task(engine.generate(request("r")))
        await in_flight(rig)
        rig.kill()
        done = await asking
        assert done.tokens.tolist() == [1000, 1001, 1002, 1003, 1004]
        assert done.policy_versions.tolist() == [5] * 5 and rig.engine.version == 5
        await rig.came.wait()
        assert await rig.engine.ready()
        assert rig.engine.stats().num_completed == 1 and rig.engine.stats().version == 5
    assert [kind for kind, _ in rig.told] == ["sglang", "sglang_gone", "sglang", "sglang_back"]
    assert rig.told[1][1]["why"] == "killed by SIGKILL" and rig.told[3][1]["after_s"] > 0
    assert rig.given == [4, 5] and rig.server.pid is None


async def test_what_was_told_of_a_sample_is_kept_when_its_server_dies(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    told: list[Prefix] = []
    two = asyncio.Event()

    def progress(so_far: Prefix) -> None:
        told.append(so_far)
        if len(so_far.tokens) == 2:
            two.set()

    async with dispatched(rig) as engine:
        await engine.update_weights(4, {})
        rig.newest = 5
        rig.hold.touch()
        asking = asyncio.create_task(engine.generate(replace(request("r"), kind="agent", progress=progress)))
        async with waiting("two tokens", peer="server", deadline_s=DEADLINE_S):
            await two.wait()
        rig.kill()
        done = await asking
        # A pretender begins at 1000 with every question: the second one was asked for three tokens.
        assert done.tokens.tolist() == [1000, 1001, 1000, 1001, 1002]
        assert done.policy_versions.tolist() == [4, 4, 5, 5, 5] and done.log_probs.tolist() == [-1.0] * 5
    sizes = [len(so_far.tokens) for so_far in told]
    assert sizes == sorted(set(sizes)) and sizes[-1] < 5
    assert all(so_far.tokens.tolist() == done.tokens[: len(so_far.tokens)].tolist() for so_far in told)
    assert told[-1].policy_versions.tolist() == done.policy_versions[: sizes[-1]].tolist()


async def test_a_stream_is_cancelled_as_any_request_and_ends_with_what_was_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    two = asyncio.Event()
    async with kept([rig.engine]):
        rig.hold.touch()
        asked = replace(
            request("r", 1000), kind="agent", progress=lambda so_far: two.set() if len(so_far.tokens) == 2 else None
        )
        asking = asyncio.create_task(rig.engine.generate(asked))
        await two.wait()
        rig.engine.cancel("r")
        done = await asking
        assert done.finish_reason == "cancelled" and done.tokens.tolist() == [1000, 1001]


async def test_a_server_that_leaves_is_told_to_who_asked_and_the_next_one_has_no_version_until_it_is_given_weights(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        await rig.engine.update_weights(4, {})
        assert await rig.engine.proved_version() == 4
        rig.hold.touch()
        asking = asyncio.create_task(rig.engine.generate(request("r")))
        await in_flight(rig)
        rig.kill()
        with pytest.raises(PeerGone):
            await asking
        await rig.left.wait()
        with pytest.raises(PeerGone):
            await rig.engine.generate(request("r"))
        assert rig.engine.stats().num_running == 0
        with pytest.raises(PeerGone, match="must be there, got killed by SIGKILL"):
            await rig.engine.ready()
        await there(rig)
        assert rig.engine.version == -1 and await rig.engine.proved_version() is None
        assert not rig.came.is_set()
        await rig.engine.update_weights(5, {})
        assert rig.came.is_set()
        assert (await rig.engine.generate(request("r", 1))).policy_versions.tolist() == [5]


async def test_an_update_that_a_server_takes_with_it_reaches_the_next_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with dispatched(rig) as engine:
        rig.kills_in_update = 1
        await engine.update_weights(7, {})
        assert rig.given == [7]
        assert (await engine.generate(request("r"))).policy_versions.tolist() == [7] * 5


async def test_a_server_that_stands_still_in_an_update_is_ended_and_the_update_reaches_the_next_one(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    async with dispatched(rig) as engine:
        rig.stops_in_update, rig.newest = 1, 7
        first = rig.server.pid
        await engine.update_weights(7, {})  # whose own deadline is ten minutes
        assert first is not None and not psutil.pid_exists(first) and rig.given == [7]
        assert (await engine.generate(request("r"))).policy_versions.tolist() == [7] * 5
    told = [data["why"] for kind, data in rig.told if kind == "sglang_gone"]
    assert told[0].startswith("it answered nothing for ")


async def test_a_next_server_that_dies_before_it_serves_is_followed_by_another(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with dispatched(rig) as engine:
        await engine.update_weights(4, {})
        rig.newest, rig.deaths_at_start = 4, 2
        rig.kill()
        await rig.came.wait()
        assert (await engine.generate(request("r"))).policy_versions.tolist() == [4] * 5
    assert [data["why"] for kind, data in rig.told if kind == "sglang_gone"][1:] == ["it did not start: planted"] * 2


async def test_a_request_that_waits_for_a_server_can_be_cancelled_and_ends_with_the_engine(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with dispatched(rig) as engine:
        await engine.update_weights(4, {})
        rig.newest = 4
        rig.kill()
        await rig.server.gone()
        while rig.engine.engine is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking = [asyncio.create_task(engine.generate(request(f"r{n}"))) for n in range(2)]
        await asyncio.sleep(0)
        assert engine.stats().num_waiting == 2
        engine.cancel("r0")
        engine.cancel("unknown")
        done = await asking[0]
        assert done.finish_reason == "cancelled" and len(done.tokens) == 0
        await engine.close()
        with pytest.raises(Closed):
            await asking[1]
        with pytest.raises(Closed):
            await engine.generate(request("late"))


async def test_a_cancelled_request_has_what_was_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        rig.hold.touch()
        asking = asyncio.create_task(rig.engine.generate(request("r", 1000)))
        await in_flight(rig)
        rig.engine.cancel("r")
        done = await asking
        assert done.finish_reason == "cancelled" and len(done.tokens) < 1000


async def test_a_server_that_gave_its_memory_back_has_it_again_with_the_next_weights_or_for_who_asks(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        await rig.engine.update_weights(1, {})
        rig.newest = 1
        assert rig.engine.engine is not None
        await rig.engine.sleep()
        await rig.engine.sleep()
        assert rig.engine.engine.asleep and await rig.engine.ready()
        await rig.engine.update_weights(2, {})
        rig.newest = 2
        assert not rig.engine.engine.asleep
        assert (await rig.engine.generate(request("r"))).policy_versions.tolist() == [2] * 5
        await rig.engine.sleep()
        asked = [rig.engine.generate(request(name)) for name in ("a", "b")]
        assert {version for done in await asyncio.gather(*asked) for version in done.policy_versions.tolist()} == {2}
        assert rig.given == [1, 2, 2] and not rig.engine.engine.asleep


async def test_a_server_with_requests_keeps_its_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        await rig.engine.update_weights(1, {})
        rig.hold.touch()
        asking = asyncio.create_task(rig.engine.generate(request("r")))
        await in_flight(rig)
        await rig.engine.sleep()
        assert rig.engine.engine is not None and not rig.engine.engine.asleep
        rig.hold.unlink()
        await asking


async def test_who_asks_a_server_that_sleeps_when_no_weights_are_left_is_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        await rig.engine.update_weights(1, {})
        await rig.engine.sleep()
        with pytest.raises(Closed, match="the run is over"):
            await rig.engine.generate(request("r"))


async def test_a_server_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        first = rig.server.pid
        assert first is not None
        rig.hold.touch()
        asking = asyncio.create_task(rig.engine.generate(request("r")))
        await in_flight(rig)
        rig.stop()
        with pytest.raises(PeerGone, match="got it answered nothing for"):
            await asking
        rig.hold.unlink()
        await there(rig)
        assert rig.server.pid not in (None, first) and not psutil.pid_exists(first)
    assert [kind for kind, _ in rig.told][:3] == ["sglang", "sglang_gone", "sglang"]


async def test_a_wake_that_fails_is_told_to_those_who_ask_and_tried_again_for_the_next(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with kept([rig.engine]):
        await rig.engine.update_weights(1, {})
        await rig.engine.sleep()
        rig.newest, rig.fails = 2, 1
        asked = [asyncio.create_task(rig.engine.generate(request(f"r{n}"))) for n in range(2)]
        for failed in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(failed, NotThere) and "must wake with the newest weights, got CorruptData" in str(failed)
        assert rig.server.pid is not None and rig.engine.engine is not None and rig.engine.engine.asleep
        assert (await rig.engine.generate(request("r"))).policy_versions.tolist() == [2] * 5
        await rig.engine.sleep()
        rig.fails = 1
        asking = asyncio.create_task(rig.engine.generate(request("r")))
        await asyncio.sleep(0)
        await rig.engine.close()
        with pytest.raises((Closed, PeerGone)):
            await asking


async def test_a_server_that_is_ended_with_its_engine_is_not_started_again(tmp_path: Path) -> None:
    """Whoever has the engine may close it before those who keep the servers end."""
    rig = Rig(tmp_path)
    assert await rig.engine.begin() is None
    keeping = asyncio.create_task(rig.engine.keep())
    await rig.engine.update_weights(1, {})
    await rig.engine.close()
    async with asyncio.timeout(DEADLINE_S):
        await keeping
    assert rig.server.pid is None and [kind for kind, _ in rig.told] == ["sglang"]


class Ending(Rig):
    """Whose engine is closed while its second server starts."""

    async def _connect(self, client: SGLangClient) -> SGLangEngine:
        if self.told:
            await self.engine.close()
            raise PeerGone("planted")
        return await super()._connect(client)


async def test_a_server_that_is_ended_while_it_starts_is_not_started_again(tmp_path: Path) -> None:
    rig = Ending(tmp_path)
    assert await rig.engine.begin() is None
    keeping = asyncio.create_task(rig.engine.keep())
    rig.kill()
    async with asyncio.timeout(DEADLINE_S):
        await keeping
    assert rig.server.pid is None and [kind for kind, _ in rig.told] == ["sglang", "sglang_gone"]
