"""New weights over several servers: generation never stops everywhere, and nobody serves what is not proved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.roles.engines.dispatch import Dispatcher, NoEngine
from rondo.roles.engines.engine import Completion, EngineStats, Request
from rondo.runtime.errors import ConfigError, PeerGone, Refused
from tests.roles.engines.dispatch.engines import QUICK, asked, check, nothing
from tests.roles.engines.dispatch.stub import Nursery, record_of
from tests.roles.engines.dispatch.test_killed import gone, nursery, order, routable, world
from tests.schedules import later

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
    limits = replace(QUICK, update_deadline_s=3600.0, probe_deadline_s=2.0)
    async with world(nursery, tmp_path, "a", "b", limits=limits) as (_, dispatcher):
        await order(dispatcher, "a", faults={"update": "hang"})
        begun, updating = time.monotonic(), asyncio.create_task(dispatcher.update_weights(2, {}))
        while not any(line["stub"] == "a" and line["at"] > begun for line in record_of(tmp_path)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        later(3600.0)
        await updating
        await routable(dispatcher, "b")
        assert [e.routable for e in dispatcher.dispatch_stats().engines] == [False, True]
        assert dispatcher.version == 2


async def test_no_server_takes_the_weights_is_an_error_that_says_who(nursery: Nursery, tmp_path: Path) -> None:
    limits = replace(QUICK, absent_deadline_s=2.0)
    async with world(nursery, tmp_path, "a", limits=limits) as (found, dispatcher):
        found["a"].kill()
        await gone(dispatcher, "a")
        with pytest.raises(NoEngine, match=r"version 2 must be taken by an engine within 2 s, got none. Missing are a"):
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

    def progress(self) -> dict[str, int]:
        return {}

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


async def test_weights_that_come_while_others_roll_follow_when_all_have_taken_these() -> None:
    engines = [Told() for _ in range(3)]
    dispatcher = Dispatcher(engines, reload=nothing, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1", "engine-2")
    engines[0].allowed.clear()
    first = asyncio.create_task(dispatcher.update_weights(2, {"w": np.ones(2)}))
    await engines[0].updating.wait()
    second = asyncio.create_task(dispatcher.update_weights(3, {"w": np.ones(3)}))
    engines[0].allowed.set()
    await first
    await second
    assert [engine.taken for engine in engines] == [[2, 3]] * 3 and dispatcher.version == 3
    await dispatcher.close()
    assert all(engine.closed for engine in engines)


async def test_the_version_is_the_oldest_of_those_that_serve_and_rises_when_the_last_has_proved() -> None:
    engines = [Told() for _ in range(2)]
    dispatcher = Dispatcher(engines, reload=nothing, limits=QUICK)
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
    dispatcher = Dispatcher(engines, reload=nothing, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    engines[1].allowed.clear()
    tensors = {"w": np.ones(1)}
    task = asyncio.create_task(dispatcher.update_weights(2, tensors))
    await engines[1].updating.wait()
    assert engines[1].reading is tensors
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
    dispatcher = Dispatcher(engines, reload=nothing, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    for engine in engines:
        engine.error = ConfigError("names differ")
    with pytest.raises(ConfigError, match="names differ"):
        await dispatcher.update_weights(2, {})
    assert dispatcher.version == 1 and len(dispatcher._fleet.routable) == 2
    await dispatcher.close()


async def test_an_engine_that_fails_its_update_is_left_out_and_asked_again_only_where_no_other_takes_it() -> None:
    engines = [Told() for _ in range(2)]
    dispatcher = Dispatcher(engines, reload=nothing, limits=QUICK)
    await routable(dispatcher, "engine-0", "engine-1")
    engines[0].error = PeerGone("broken")
    await dispatcher.update_weights(2, {})
    assert [e.routable for e in dispatcher.dispatch_stats().engines] == [False, True] and dispatcher.version == 2
    engines[1].error = PeerGone("broken too")
    task = asyncio.create_task(dispatcher.update_weights(3, {}))
    await gone(dispatcher, "engine-1")
    engines[0].error = None
    await task
    assert engines[0].taken == [3] and dispatcher.version == 3
    await dispatcher.close()


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_eight_engines_of_32_s_an_update_all_take_it_in_their_waves() -> None:
    clock, engines = Clock(), [Told() for _ in range(8)]
    names = [f"engine-{i}" for i in range(8)]
    dispatcher = Dispatcher(engines, reload=nothing, limits=replace(QUICK, update_deadline_s=None), clock=clock)
    await routable(dispatcher, *names)
    for version in (2, 3):
        for engine in engines:
            engine.allowed.clear()
            engine.updating.clear()
        task = asyncio.create_task(dispatcher.update_weights(version, {}))
        while not task.done():
            under_way = [engine for engine in engines if engine.updating.is_set() and not engine.allowed.is_set()]
            clock.now += 32.0 if under_way else 0.0
            for engine in under_way:
                engine.allowed.set()
            await asyncio.sleep(0)
        await task
        assert [engine.taken[-1] for engine in engines] == [version] * 8
        assert len(dispatcher._fleet.routable) == 8
    assert clock.now >= 4 * 32.0
    await dispatcher.close()


class Silent(Told):
    """Is not there, once it is told to be gone: nothing that is asked of it is answered."""

    gone = False
    num_updates = 0

    async def ready(self) -> bool:
        return not self.gone

    async def proved_version(self) -> int | None:
        if self.gone:
            raise PeerGone("nobody is there")
        return self.version

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.num_updates += 1
        await super().update_weights(version, tensors)
        if self.gone:
            raise PeerGone("nobody is there")


async def test_an_update_neither_asks_nor_awaits_an_engine_that_is_known_to_be_gone() -> None:
    engines = [Silent(), Silent(), Told()]
    dispatcher = Dispatcher(engines, reload=nothing, limits=replace(QUICK, update_deadline_s=None))
    await dispatcher.update_weights(1, {})
    engines[0].gone = True
    await gone(dispatcher, "engine-0")
    for version in (2, 3):
        await dispatcher.update_weights(version, {})
        assert [e.version for e in dispatcher.dispatch_stats().engines][1:] == [version] * 2
    assert engines[0].num_updates == 0
    await dispatcher.close()


async def test_one_of_eight_that_is_away_makes_an_update_no_more_waves() -> None:
    engines = [Silent() for _ in range(8)]
    dispatcher = Dispatcher(engines, reload=nothing, limits=replace(QUICK, update_deadline_s=None))
    await routable(dispatcher, *(f"engine-{i}" for i in range(8)))
    engines[0].gone = True
    await gone(dispatcher, "engine-0")
    for engine in engines:
        engine.allowed.clear()
    task, waves = asyncio.create_task(dispatcher.update_weights(2, {})), []
    while not task.done():
        wave = [engine for engine in engines if engine.updating.is_set() and not engine.allowed.is_set()]
        waves += [len(wave)] if wave else []
        for engine in wave:
            engine.allowed.set()
        await asyncio.sleep(0.005)
    assert waves == [4, 3]
    await dispatcher.close()


async def test_one_that_dies_in_its_update_is_left_behind_and_asked_by_no_later_one() -> None:
    engines = [Silent(), Told()]
    dispatcher = Dispatcher(
        engines, reload=nothing, limits=replace(QUICK, update_deadline_s=None, health_interval_s=0.01)
    )
    await dispatcher.update_weights(1, {})
    engines[0].allowed.clear()
    engines[0].updating.clear()
    task = asyncio.create_task(dispatcher.update_weights(2, {}))
    await engines[0].updating.wait()
    engines[0].gone = True
    engines[0].allowed.set()
    await task
    await dispatcher.update_weights(3, {})
    assert engines[0].num_updates == 1 and engines[1].taken == [2, 3]
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
    dispatcher = Dispatcher([doubtful, sound], reload=nothing, limits=QUICK)
    await dispatcher.update_weights(2, {})
    done = await asyncio.gather(*(dispatcher.generate(asked(f"r{i}", group=i)) for i in range(8)))
    assert [completion.policy_versions.tolist() for completion in done] == [[2]] * 8
    assert 1 <= doubtful.num_asked <= 8
    await gone(dispatcher, "engine-0")
    assert (await dispatcher.generate(asked("s"))).policy_versions.tolist() == [2]
    await dispatcher.close()
