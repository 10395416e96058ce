"""Servers that are killed and stopped while requests are under way: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rondo.roles.engines.dispatch import Dispatcher, DispatchLimits, NoEngine
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.engines.faults import RequestFailed
from rondo.runtime.errors import PeerGone
from tests.roles.engines.dispatch.engines import QUICK, ThinEngine, asked, check
from tests.roles.engines.dispatch.stub import STEP_S, Nursery, Stub, record_of, stubs


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


@contextlib.asynccontextmanager
async def world(
    nursery: Nursery,
    folder: Path,
    *names: str,
    step_s: float = STEP_S,
    limits: DispatchLimits = QUICK,
    num_slots: int = 64,
) -> AsyncIterator[tuple[dict[str, Stub], Dispatcher]]:
    """Stubs behind a dispatcher that can reload version 1."""

    @contextlib.asynccontextmanager
    async def reload() -> AsyncIterator[tuple[int, dict[str, object]]]:
        yield dispatcher.version, {}

    with stubs(nursery, *names, folder=folder, step_s=step_s) as found:
        engines = [ThinEngine(found[name], num_slots) for name in names]
        dispatcher = Dispatcher(engines, names=names, limits=limits, reload=reload)
        try:
            await dispatcher.update_weights(1, {})
            yield found, dispatcher
        finally:
            await dispatcher.close()


async def order(dispatcher: Dispatcher, name: str, **orders: object) -> dict[str, list[str]]:
    member = next(m for m in dispatcher._fleet.members if m.name == name)
    assert isinstance(member.engine, ThinEngine)
    told: dict[str, list[str]] = await member.engine.call("post", "/stub", orders)
    return told


async def running(dispatcher: Dispatcher, *names: str, count: int) -> None:
    """Until so many requests are under way at each of these servers."""
    async with asyncio.timeout(60):
        for name in names:
            while len((await order(dispatcher, name))["running"]) < count:
                pass


async def test_a_request_whose_server_is_killed_is_answered_by_another(nursery: Nursery, tmp_path: Path) -> None:
    async with world(nursery, tmp_path, "a", "b", step_s=0) as (found, dispatcher):
        requests = [asked(f"r{i}", group=i) for i in range(8)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        await running(dispatcher, "a", "b", count=4)
        found["a"].kill()
        await running(dispatcher, "b", count=5)
        await order(dispatcher, "b", release=True)
        for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(request, completion)
        stats = dispatcher.dispatch_stats()
        assert (stats.num_completed, stats.num_lost_attempts, stats.tokens_delivered) == (8, 4, 8 * 4)
        assert [engine.routable for engine in stats.engines] == [False, True]


async def test_a_server_that_stands_still_is_left_for_another(nursery: Nursery, tmp_path: Path) -> None:
    limits = replace(QUICK, silent_s=0.2)
    async with world(nursery, tmp_path, "a", "b", step_s=0, limits=limits) as (found, dispatcher):
        requests = [asked(f"r{i}", group=i) for i in range(4)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        await running(dispatcher, "a", "b", count=2)
        found["a"].kill(signal.SIGSTOP)
        try:
            await order(dispatcher, "b", release=True)
            for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
                check(request, completion)
            assert dispatcher.dispatch_stats().num_completed == 4
        finally:
            found["a"].kill(signal.SIGCONT)
        # What it still makes of them when it goes on, nobody hears: their connections are closed.
        await routable(dispatcher, "a")
        assert (await order(dispatcher, "a"))["running"] == []


async def test_a_server_that_stood_still_through_a_new_version_brings_nothing_of_the_old_one_and_gets_the_new_one_first(
    nursery: Nursery, tmp_path: Path
) -> None:
    limits = replace(QUICK, silent_s=0.2)
    async with world(nursery, tmp_path, "a", "b", step_s=0, limits=limits) as (found, dispatcher):
        requests = [asked(f"r{i}", group=i) for i in range(4)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        await running(dispatcher, "a", "b", count=2)
        await order(dispatcher, "a", faults={"partial": 4})  # it has all of its tokens, and stands before it says so
        found["a"].kill(signal.SIGSTOP)
        try:
            await gone(dispatcher, "a")
            await dispatcher.update_weights(2, {})
            assert [engine.version for engine in dispatcher.dispatch_stats().engines if engine.routable] == [2]
            await running(
                dispatcher, "b", count=3
            )  # of the two that the other one had, which it may hang by, one at a time
            stopped_at = record_of(tmp_path)[-1]["at"]
        finally:
            found["a"].kill(signal.SIGCONT)
        await routable(dispatcher, "a", "b")
        for name in ("a", "b"):
            await order(dispatcher, name, release=True)
        for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(request, completion)
        later = [asyncio.create_task(dispatcher.generate(asked(f"s{i}", group=i))) for i in range(4)]
        assert {v for done in await asyncio.gather(*later) for v in done.policy_versions.tolist()} == {2}
        stats = dispatcher.dispatch_stats()
        assert (stats.num_completed, stats.num_lost_attempts, stats.tokens_delivered) == (8, 2, 8 * 4)
    since = [line for line in record_of(tmp_path) if line["stub"] == "a" and line["at"] > stopped_at]
    assert [line["event"] for line in since if line["event"] in ("update", "begin")][:1] == ["update"]


async def test_an_engine_that_leaves_gets_neither_requests_nor_weights_and_what_it_has_ends_there_or_elsewhere(
    nursery: Nursery, tmp_path: Path
) -> None:
    async with world(nursery, tmp_path, "a", "b", "c", step_s=0) as (_, dispatcher):
        requests = [asked(f"r{i}", group=i) for i in range(3)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        await running(dispatcher, "a", "b", "c", count=1)
        leaving = [
            asyncio.create_task(dispatcher.drain("a", deadline_s=60)),
            asyncio.create_task(dispatcher.drain("b", deadline_s=0.0)),
        ]
        await leaving[1]  # what it had goes elsewhere
        await running(dispatcher, "c", count=2)
        await dispatcher.update_weights(2, {})
        await order(dispatcher, "a", release=True)
        await leaving[0]  # what it had has ended there
        for name in ("a", "b"):
            await dispatcher.remove(name)
        await order(dispatcher, "c", release=True)
        for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(request, completion)
        stats = dispatcher.dispatch_stats()
        assert ([each.name for each in stats.engines], stats.num_completed, stats.num_lost_attempts) == (["c"], 3, 1)
        assert dispatcher.stats().tokens_generated == 3 * 4 and dispatcher.version == 2
    assert {line["stub"] for line in record_of(tmp_path) if line["event"] == "update" and line["version"] == "2"} == {
        "c"
    }


async def routable(dispatcher: Dispatcher, *names: str) -> None:
    async with asyncio.timeout(60):
        while not {m.name for m in dispatcher._fleet.routable} >= set(names):
            dispatcher._fleet.moved.clear()
            await dispatcher._fleet.moved.wait()


async def test_a_restarted_server_gets_the_weights_before_it_gets_requests(nursery: Nursery, tmp_path: Path) -> None:
    async with world(nursery, tmp_path, "a") as (found, dispatcher):
        found["a"].kill()
        await gone(dispatcher, "a")
        task = asyncio.create_task(dispatcher.generate(asked("r")))
        found["a"].start()
        check(asked("r"), await task)
    events = [line["event"] for line in record_of(tmp_path) if line["pid"] == found["a"].pid]
    assert events.index("update") < events.index("begin")


async def test_what_a_server_sampled_that_was_restarted_unseen_is_thrown_away(nursery: Nursery, tmp_path: Path) -> None:
    limits = replace(QUICK, health_interval_s=3600.0)
    async with world(nursery, tmp_path, "a", limits=limits) as (found, dispatcher):
        await dispatcher.generate(asked("before"))
        found["a"].kill()
        found["a"].start()
        completion = await dispatcher.generate(asked("r"))
        check(asked("r"), completion)
        assert completion.policy_versions.tolist() == [1] * 4
        stats = dispatcher.dispatch_stats()
        assert (stats.num_completed, stats.tokens_delivered) == (2, 8) and stats.num_lost_attempts >= 1


async def test_every_server_killed_at_once_loses_nothing(nursery: Nursery, tmp_path: Path) -> None:
    async with world(nursery, tmp_path, "a", "b", step_s=0) as (found, dispatcher):
        requests = [asked(f"r{i}", 100, group=i) for i in range(8)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        await running(dispatcher, "a", "b", count=4)
        for stub in found.values():
            stub.kill()
        for stub in found.values():
            stub.start()
        for name in ("a", "b"):
            told = None
            while told is None:
                with contextlib.suppress(PeerGone):  # by a connection of its life before
                    told = await order(dispatcher, name, release=True)
        for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(request, completion)
            assert set(completion.policy_versions.tolist()) == {1}


async def test_without_any_engine_a_request_fails_and_says_who_is_missing(nursery: Nursery, tmp_path: Path) -> None:
    limits = replace(QUICK, absent_deadline_s=2.0)
    async with world(nursery, tmp_path, "a", limits=limits) as (found, dispatcher):
        found["a"].kill()
        with pytest.raises(NoEngine, match=r"an engine must take a request within 2 s, got none. Missing are a: ") as e:
            await dispatcher.generate(asked("r"))
        assert [name for name, _ in e.value.missing] == ["a"]
        stats = dispatcher.dispatch_stats()
        assert (stats.num_failed, stats.num_waiting, stats.num_in_flight) == (1, 0, 0)


async def test_a_request_that_kills_two_servers_kills_no_third_and_those_beside_it_are_answered(
    nursery: Nursery, tmp_path: Path
) -> None:
    names = ("a", "b", "c", "d")
    async with world(nursery, tmp_path, *names, limits=replace(QUICK, most_kills=2)) as (_, dispatcher):
        requests = [asked(f"r{i}", 40, group=i) for i in range(32)]
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests]
        while dispatcher.dispatch_stats().num_in_flight < 32:  # noqa: ASYNC110 - a count
            await asyncio.sleep(0)
        for name in names:
            await order(dispatcher, name, faults={"dies_of": "poison"})
        with pytest.raises(RequestFailed, match=r"'poison' must leave its engines alive, got .*PeerGone|the SGLang"):
            await dispatcher.generate(asked("poison", group=99))
        for request, completion in zip(requests, await asyncio.gather(*tasks), strict=True):
            check(request, completion)
        assert len(dispatcher._fleet.routable) == 2


async def test_what_a_server_hands_back_early_is_gone_on_with_elsewhere(nursery: Nursery, tmp_path: Path) -> None:
    async with world(nursery, tmp_path, "a", "b", step_s=0) as (_, dispatcher):
        await order(dispatcher, "b", faults={"unready": True})
        await gone(dispatcher, "b")
        await order(dispatcher, "a", faults={"partial": 3})
        task = asyncio.create_task(dispatcher.generate(asked("r", 8)))
        await running(dispatcher, "a", count=1)
        await order(dispatcher, "b", faults={"unready": False}, release=True)
        await routable(dispatcher, "b")
        await order(dispatcher, "a", faults={"unready": True})
        await gone(dispatcher, "a")
        member = next(m for m in dispatcher._fleet.members if m.name == "a")
        await member.engine.call("post", "/abort_request", {"abort_all": True})  # type: ignore[attr-defined]
        check(asked("r", 8), await task)
        stats = dispatcher.dispatch_stats()
        assert (stats.num_continued, stats.tokens_delivered) == (1, 8)
        assert dispatcher.stats().tokens_generated == 8  # 3 of the engine that ended it, 5 of the other
    asked_for = {line["stub"]: line["tokens"] for line in record_of(tmp_path) if line["event"] == "end"}
    assert asked_for == {"a": 3, "b": 5}


async def gone(dispatcher: Dispatcher, name: str) -> None:
    async with asyncio.timeout(60):
        while name in {m.name for m in dispatcher._fleet.routable}:
            dispatcher._fleet.moved.clear()
            await dispatcher._fleet.moved.wait()


async def test_a_request_is_cancelled_on_its_engine_in_the_queue_and_between_attempts(
    nursery: Nursery, tmp_path: Path
) -> None:
    limits = replace(QUICK, in_flight=1)
    async with world(nursery, tmp_path, "a", step_s=0, limits=limits) as (found, dispatcher):
        await order(dispatcher, "a", faults={"partial": 2})
        first = asyncio.create_task(dispatcher.generate(asked("first")))
        await running(dispatcher, "a", count=1)
        waits = asyncio.create_task(dispatcher.generate(asked("waits")))
        await asyncio.sleep(0)
        dispatcher.cancel("waits")
        done = await waits
        assert (done.finish_reason, len(done.tokens)) == ("cancelled", 0)
        dispatcher.cancel("first")
        done = await first
        assert (done.finish_reason, len(done.tokens)) == ("cancelled", 2)
        between = asyncio.create_task(dispatcher.generate(asked("between")))
        await running(dispatcher, "a", count=1)
        found["a"].kill()
        await gone(dispatcher, "a")
        dispatcher.cancel("between")
        assert (await between).finish_reason == "cancelled"
        assert dispatcher.dispatch_stats().num_cancelled == 3


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_kills_and_updates_lose_nothing_and_bring_nothing_twice(
    nursery: Nursery, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    names = ("a", "b", "c")
    ledger: dict[str, list[Completion | Exception]] = {}
    begun: list[Request] = []

    async def one(dispatcher: Dispatcher, request: Request) -> None:
        begun.append(request)
        ledger.setdefault(request.id, [])
        ledger[request.id].append(await dispatcher.generate(request))

    async with world(nursery, tmp_path, *names, num_slots=4) as (found, dispatcher):
        num_kills = 0
        async with asyncio.TaskGroup() as tasks:
            for i in range(120):
                request = asked(f"r{i}", chance.randrange(1, 60), group=i // 4, kind=chance.choice(["train", "judge"]))
                tasks.create_task(one(dispatcher, request))
            for version in range(2, 6):
                updating = tasks.create_task(dispatcher.update_weights(version, {}))
                for victim in chance.sample(names, chance.randrange(1, 3)):
                    await asyncio.sleep(chance.random() * 0.05)
                    found[victim].kill(signal.SIGKILL)
                    num_kills += 1
                    found[victim].start()
                await updating
        assert num_kills >= 4
        for request in begun:
            outcomes = ledger[request.id]
            assert len(outcomes) == 1, f"{request.id} came {len(outcomes)} times"
            assert isinstance(outcomes[0], Completion)
            check(request, outcomes[0])
            assert outcomes[0].policy_versions.min() >= 1, "a token of weights that nobody proved"
        stats = dispatcher.dispatch_stats()
        assert (stats.num_requests, stats.num_completed, stats.num_waiting, stats.num_in_flight) == (120, 120, 0, 0)
        assert stats.tokens_delivered == sum(request.params.max_new_tokens for request in begun)
        assert dispatcher.version == 5
        assert [m.load for m in dispatcher._fleet.members] == [m.foreign for m in dispatcher._fleet.members]
