"""New weights over several servers: generation never stops everywhere, and nobody serves what is not proved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.roles.rollout.dispatch import Dispatcher, NoEngine
from rondo.roles.rollout.engine import Completion, EngineStats, Request
from rondo.runtime.errors import ConfigError, PeerGone, Refused
from tests.roles.rollout.dispatch.engines import QUICK, asked, check
from tests.roles.rollout.dispatch.stub import Nursery, record_of
from tests.roles.rollout.dispatch.test_killed import gone, nursery, order, routable, world

__all__ = ["nursery"]


async def keep_asking(dispatcher: Dispatcher, done: asyncio.Event, lane: int) -> int:
    """Requests one after another until `done`; how many."""
    count = 0
    while not done.is_set():
        request = asked(f"{lane}.{count}", 10, group=lane)
        check(request, await dispatcher.generate(request))
        count += 1
    return count


@pytest.mark.parametrize("names", ["ab", "abcde"])
async def test_some_server_serves_at_every_moment_of_an_update(nursery: Nursery, tmp_path: Path, names: str) -> None:
    async with world(nursery, tmp_path, *names) as (_, dispatcher):
        begun, done = time.monotonic(), asyncio.Event()
        asking = [asyncio.create_task(keep_asking(dispatcher, done, lane)) for lane in range(4)]
        for version in range(2, 6):
            await dispatcher.update_weights(version, {})
            assert dispatcher.version == version
        done.set()
        assert min(await asyncio.gather(*asking)) > 0
    paused: set[str] = set()
    most = 0
    events = [
        line for line in record_of(tmp_path) if line["at"] > begun and line["event"] in ("pause", "continue", "update")
    ]
    for line in events:
        if line["event"] != "update":
            (paused.add if line["event"] == "pause" else paused.discard)(line["stub"])
        most = max(most, len(paused))
    assert 1 <= most <= len(names) // 2
    assert sum(line["event"] == "update" for line in events) == 4 * len(names)


async def test_requests_in_flight_stay_where_they_are_and_go_on_under_the_new_weights(
    nursery: Nursery, tmp_path: Path
) -> None:
    async with world(nursery, tmp_path, "a", "b", step_s=0) as (_, dispatcher):
        for name in "ab":
            await order(dispatcher, name, faults={"partial": 2})
        requests = [asked(f"r{i}", group=i) for i in range(4)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        for name in "ab":
            while len((await order(dispatcher, name))["running"]) < 2:
                pass
        await dispatcher.update_weights(2, {})
        for name in "ab":
            await order(dispatcher, name, release=True)
        for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(request, completion)
            assert completion.policy_versions.tolist() == [1, 1, 2, 2]
        assert dispatcher.dispatch_stats().num_lost_attempts == 0


@pytest.mark.parametrize("fault", ["fail", "die"])
async def test_a_server_that_fails_its_update_is_out_until_it_has_proved_the_weights(
    nursery: Nursery, tmp_path: Path, fault: str
) -> None:
    async with world(nursery, tmp_path, "a", "b") as (found, dispatcher):
        await order(dispatcher, "a", faults={"update": fault})
        await dispatcher.update_weights(2, {})
        assert dispatcher.version == 2
        assert [e.name for e in dispatcher.dispatch_stats().engines if e.routable] == ["b"]
        request = asked("r")
        check(request, await dispatcher.generate(request))
        if fault == "die":
            found["a"].start()
        else:
            await order(dispatcher, "a", faults={"update": None})
        await routable(dispatcher, "a", "b")
        assert [e.version for e in dispatcher.dispatch_stats().engines] == [2, 2]
    assert all(line["stub"] == "b" for line in record_of(tmp_path) if line["event"] == "begin")


async def test_a_server_that_hangs_in_its_update_is_left_behind(nursery: Nursery, tmp_path: Path) -> None:
    limits = replace(QUICK, update_grace_s=0.1)
    async with world(nursery, tmp_path, "a", "b", limits=limits) as (_, dispatcher):
        await order(dispatcher, "a", faults={"update": "hang"})
        await dispatcher.update_weights(2, {})
        assert [e.routable for e in dispatcher.dispatch_stats().engines] == [False, True]
        assert dispatcher.version == 2


async def test_no_server_takes_the_weights_is_an_error_that_says_who(nursery: Nursery, tmp_path: Path) -> None:
    limits = replace(QUICK, absent_deadline_s=0.3)
    async with world(nursery, tmp_path, "a", limits=limits) as (found, dispatcher):
        found["a"].kill()
        await gone(dispatcher, "a")
        with pytest.raises(
            NoEngine, match=r"version 2 must be taken by an engine within 0.3 s, got none. Missing are a"
        ):
            await dispatcher.update_weights(2, {})
        assert dispatcher.version == 1


# ---- without servers: engines that do as they are told ----------------------------------------------------------------


class Told:
    """An engine in this process. Its update ends when it is allowed to."""

    def __init__(self, version: int = 1) -> None:
        self.version = version
        self.taken: list[int] = []
        self.allowed = asyncio.Event()
        self.allowed.set()
        self.updating = asyncio.Event()
        self.reading: Mapping[str, Any] | None = None
        self.error: Exception | None = None
        self.closed = False

    async def generate(self, request: Request) -> Completion:
        tokens = request.prompt[:1]
        return Completion(request.id, tokens, tokens.astype("f4"), tokens * 0 + self.version, "length")

    def cancel(self, request_id: str) -> None:
        return

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.updating.set()
        self.reading = tensors
        try:
            await self.allowed.wait()
            if self.error is not None:
                raise self.error
            self.version = version
            self.taken.append(version)
        finally:
            self.reading = None

    def stats(self) -> EngineStats:
        return EngineStats(self.version, 8, 0, 0, 0, 0, 0, 0, 0, 0)

    async def close(self) -> None:
        self.closed = True


async def test_newer_weights_supersede_those_that_are_rolling_and_both_updates_return_together() -> None:
    engines = [Told() for _ in range(3)]
    dispatcher = Dispatcher(engines, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1", "engine-2")
    engines[0].allowed.clear()
    old, new = {"w": 2}, {"w": 3}
    first = asyncio.create_task(dispatcher.update_weights(2, old))
    await engines[0].updating.wait()
    second = asyncio.create_task(dispatcher.update_weights(3, new))
    await asyncio.sleep(0)
    engines[0].allowed.set()
    await asyncio.wait([first], return_when=asyncio.FIRST_COMPLETED)
    assert [engine.taken for engine in engines] == [[2, 3], [3], [3]], "the rest went straight to the newer ones"
    assert dispatcher.version == 3
    await second
    await dispatcher.close()
    assert all(engine.closed for engine in engines)


async def test_the_version_is_the_oldest_of_those_that_serve_and_rises_when_the_last_has_proved() -> None:
    engines = [Told() for _ in range(2)]
    dispatcher = Dispatcher(engines, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    engines[1].allowed.clear()
    task = asyncio.create_task(dispatcher.update_weights(2, {}))
    await engines[1].updating.wait()
    assert (engines[0].version, dispatcher.version) == (2, 1)
    engines[1].allowed.set()
    await task
    assert dispatcher.version == 2
    await dispatcher.close()


async def test_tensors_are_no_longer_read_when_an_update_returns_or_is_cancelled() -> None:
    engines = [Told() for _ in range(2)]
    dispatcher = Dispatcher(engines, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    engines[1].allowed.clear()
    task = asyncio.create_task(dispatcher.update_weights(2, {"w": 1}))
    await engines[1].updating.wait()
    assert engines[1].reading == {"w": 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [engine.reading for engine in engines] == [None, None]
    engines[1].allowed.set()
    await dispatcher.update_weights(3, {})
    assert dispatcher.version == 3
    await dispatcher.close()


async def test_tensors_that_an_engine_refuses_are_the_callers_error_and_it_keeps_its_own() -> None:
    engines = [Told() for _ in range(2)]
    dispatcher = Dispatcher(engines, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    for engine in engines:
        engine.error = ConfigError("names differ")
    with pytest.raises(ConfigError, match="names differ"):
        await dispatcher.update_weights(2, {})
    assert dispatcher.version == 1 and len(dispatcher._fleet.routable) == 2
    await dispatcher.close()


async def test_an_engine_that_is_added_serves_once_it_has_the_promised_weights() -> None:
    dispatcher = Dispatcher([Told()], limits=QUICK)
    await dispatcher.update_weights(4, {})
    late = Told(version=0)
    dispatcher.add(late, "late")
    await dispatcher.generate(asked("r"))
    assert [e.routable for e in dispatcher.dispatch_stats().engines] == [True, False]
    await dispatcher.update_weights(5, {})
    await routable(dispatcher, "engine-0", "late")
    assert await dispatcher.remove("engine-0") is not late
    assert (await dispatcher.generate(asked("s"))).policy_versions.tolist() == [5]
    with pytest.raises(ConfigError, match="the engine to remove must be one of late, got 'engine-0'"):
        await dispatcher.remove("engine-0")
    await dispatcher.close()


async def test_an_engine_is_asked_again_so_often_and_then_the_others_go_on() -> None:
    engines = [Told() for _ in range(2)]
    dispatcher = Dispatcher(engines, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    engines[0].error = PeerGone("broken")
    asked_before = []
    original = engines[0].update_weights

    async def counted(version: int, tensors: Mapping[str, Any]) -> None:
        asked_before.append(engines[1].taken.copy())
        await original(version, tensors)

    engines[0].update_weights = counted  # type: ignore[method-assign]
    await dispatcher.update_weights(2, {})
    assert asked_before == [[], [], []], "as long as it is asked again, the other one keeps serving what it has"
    assert engines[1].taken == [2] and dispatcher.version == 2
    await dispatcher.close()


async def test_an_engine_that_refuses_what_it_took_is_looked_at_and_the_request_goes_elsewhere() -> None:
    class Doubtful(Told):
        num_asked = 0

        async def generate(self, request: Request) -> Completion:
            self.num_asked += 1
            raise Refused("tokens of weights that nobody gave it")

        async def proved_version(self) -> int | None:
            return None if self.num_asked else self.version

    doubtful, sound = Doubtful(), Told()
    dispatcher = Dispatcher([doubtful, sound], limits=QUICK)
    await dispatcher.update_weights(2, {})
    done = await asyncio.gather(*(dispatcher.generate(asked(f"r{i}", group=i)) for i in range(8)))
    assert [completion.policy_versions.tolist() for completion in done] == [[2]] * 8
    assert 1 <= doubtful.num_asked <= 8
    await gone(dispatcher, "engine-0")
    assert (await dispatcher.generate(asked("s"))).policy_versions.tolist() == [2]
    await dispatcher.close()
