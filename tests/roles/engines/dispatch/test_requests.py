"""Requests and their one outcome, over engines in this process that answer when they are told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from rondo.roles.engines.dispatch import Dispatcher, DispatchLimits
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.engines.faults import RequestFailed
from rondo.roles.engines.sglang.client import ServerError
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, PeerGone
from tests.roles.engines.dispatch.engines import QUICK, Load, asked, nothing
from tests.roles.engines.dispatch.test_killed import gone, routable
from tests.roles.engines.dispatch.test_rolling import Told


class Holding(Told):
    """Keeps what it is asked until `answer`. `others` is what it reports beyond our requests."""

    def __init__(self, others: int = 0) -> None:
        super().__init__()
        self.held: dict[str, asyncio.Future[None]] = {}
        self.begun: list[str] = []
        self.came = asyncio.Event()
        self.others = others

    async def generate(self, request: Request) -> Completion:
        self.held[request.id] = asyncio.get_running_loop().create_future()
        self.begun.append(request.id)
        self.came.set()
        try:
            await self.held[request.id]
        finally:
            del self.held[request.id]
        return await super().generate(request)

    def progress(self) -> dict[str, int]:
        return {name: 5 if name == "t0" else 0 for name in self.held}

    async def load(self) -> Load:
        return Load(len(self.held) + self.others, 0)

    async def answer(self) -> None:
        """Ends one request, when there is one."""
        while not self.held:
            self.came.clear()
            await self.came.wait()
        next(iter(self.held.values())).set_result(None)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def over(*engines: Any, limits: DispatchLimits = QUICK) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(engines, reload=nothing, limits=limits)
    await routable(dispatcher, *(f"engine-{i}" for i in range(len(engines))))
    try:
        async with asyncio.timeout(60):
            yield dispatcher
    finally:
        await dispatcher.close()


async def begun(dispatcher: Dispatcher, *requests: Request) -> list[asyncio.Task[Completion]]:
    """Asked in this order."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(dispatcher.generate(request)))
        await asyncio.sleep(0)
    return tasks


async def test_a_judge_is_not_kept_waiting_by_a_queue_of_training_and_the_urgent_go_first() -> None:
    engine = Holding()
    async with over(engine, limits=replace(QUICK, in_flight=2)) as dispatcher:
        tasks = await begun(
            dispatcher,
            *(asked(f"t{i}", group=i) for i in range(5)),
            asked("urgent", group=9, priority=1),
            asked("judge", group=10, kind="judge"),
        )
        for _ in tasks:
            await engine.answer()
        await asyncio.gather(*tasks)
    assert engine.begun == ["t0", "t1", "judge", "urgent", "t2", "t3", "t4"]


async def test_a_request_comes_further_as_its_engine_says_and_in_the_queue_with_the_whole_fleet() -> None:
    engine = Holding()
    async with over(engine, limits=replace(QUICK, in_flight=2)) as dispatcher:
        tasks = await begun(dispatcher, *(asked(f"t{i}", group=i) for i in range(3)))
        before = dispatcher.progress()
        assert (before["t0"], before["t1"]) == (5, 0) and before["t2"] < 0
        engine.held["t1"].set_result(None)
        await tasks[1]
        assert dispatcher.progress() == {"t0": 5, "t2": 0}
        for _ in tasks[1:]:
            await engine.answer()
        await asyncio.gather(*tasks)


async def test_an_engine_that_serves_others_gets_less() -> None:
    busy, free = Holding(others=50), Holding()
    async with over(busy, free) as dispatcher:
        tasks = await begun(dispatcher, asked("first", group=1))
        tasks += await begun(dispatcher, *(asked(f"r{i}", group=10 + i) for i in range(8)))
        assert len(busy.begun) == 0 and len(free.begun) == 9
        busy.others = 0
        while dispatcher._fleet.members[0].foreign:
            dispatcher._fleet.moved.clear()
            await dispatcher._fleet.moved.wait()
        tasks += await begun(dispatcher, *(asked(f"s{i}", group=30 + i) for i in range(4)))
        assert len(busy.begun) == 4
        for task in tasks:
            task.cancel()


async def test_the_turns_of_a_session_go_to_one_engine() -> None:
    engines = [Told(), Told(), Told()]
    took: list[int] = []
    for index, engine in enumerate(engines):
        original = engine.generate

        async def noted(request: Request, index: int = index, original: Any = original) -> Completion:
            took.append(index)
            done: Completion = await original(request)
            return done

        engine.generate = noted  # type: ignore[method-assign]
    async with over(*engines) as dispatcher:
        for turn in range(6):
            await dispatcher.generate(asked(f"a{turn}", prompt=6 + turn, group=turn, session="a"))
    assert len(set(took)) == 1


async def test_a_caller_that_leaves_frees_its_place_and_is_counted_as_dropped() -> None:
    engine = Holding()
    async with over(engine, limits=replace(QUICK, in_flight=1)) as dispatcher:
        first, waits, last = await begun(dispatcher, asked("a"), asked("b"), asked("c"))
        waits.cancel()
        first.cancel()
        await asyncio.wait([first, waits])
        await engine.answer()
        assert (await last).request_id == "c"
        assert engine.begun == ["a", "c"]
        stats = dispatcher.dispatch_stats()
        assert (stats.num_dropped, stats.num_completed, stats.num_in_flight, stats.num_waiting) == (2, 1, 0, 0)


async def test_an_id_is_under_way_once() -> None:
    engine = Holding()
    async with over(engine) as dispatcher:
        [task] = await begun(dispatcher, asked("a"))
        with pytest.raises(ConfigError, match="the id of a request must be unique, got 'a' twice"):
            await dispatcher.generate(asked("a"))
        await engine.answer()
        await task


async def test_a_turn_that_does_not_come_is_a_named_wait_past_its_deadline() -> None:
    engine = Holding()
    async with over(engine, limits=replace(QUICK, in_flight=1, queue_deadline_s=0.05)) as dispatcher:
        [task] = await begun(dispatcher, asked("a"))
        with pytest.raises(DeadlineExceeded, match=r"wait 'engine' of .* for 'engine-0' must end within 0\.05 s"):
            await dispatcher.generate(asked("b"))
        assert dispatcher.dispatch_stats().num_waiting == 0
        task.cancel()


async def test_closing_fails_what_waits_and_what_comes() -> None:
    engine = Holding()
    async with over(engine, limits=replace(QUICK, in_flight=1)) as dispatcher:
        first, waits = await begun(dispatcher, asked("a"), asked("b"))
        await dispatcher.close()
        with pytest.raises(Closed):
            await waits
        with pytest.raises(Closed):
            await dispatcher.generate(asked("c"))
        first.cancel()
    assert engine.closed


async def test_the_names_of_engines_are_their_own() -> None:
    with pytest.raises(ConfigError, match="the name of an engine must be its own, got 'a' twice"):
        Dispatcher([Told(), Told()], reload=nothing, names=["a", "a"])


# ---- what a failure costs -------------------------------------------------------------------------------------------


class Failing(Holding):
    """Raises `errors[...]` for requests whose name begins so, and holds the others."""

    def __init__(self, **errors: Exception) -> None:
        super().__init__()
        self.errors = errors
        self.asked: list[str] = []
        self.tells = True

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request.id)
        for name, error in self.errors.items():
            if request.id.startswith(name):
                raise error
        if request.id.startswith("trial"):
            return await Told.generate(self, request)
        return await super().generate(request)

    def progress(self) -> dict[str, int]:
        return dict.fromkeys(self.held, 1) if self.tells else {}

    async def die(self) -> None:
        """Everything that it has ends with it."""
        for held in list(self.held.values()):
            held.set_exception(PeerGone("it died"))
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def fails(status: int) -> ServerError:
    return ServerError("http://stub", "/generate", status, "no")


async def test_a_request_that_engines_answer_with_500_fails_after_one_retry_and_costs_nobody_else_anything() -> None:
    engines = [Failing(poison=fails(500)) for _ in range(3)]
    async with over(*engines) as dispatcher:
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=i) for i in range(24)))
        for i in range(20):
            with pytest.raises(RequestFailed, match=rf"'poison{i}' must be answered by engines that answer others"):
                await dispatcher.generate(asked(f"poison{i}", group=99))
            for engine in engines:
                await engine.answer()
                tasks += await begun(dispatcher, asked(f"s{i}.{id(engine)}", group=i))
        assert sum(name.startswith("poison") for engine in engines for name in engine.asked) == 40
        stats = dispatcher.dispatch_stats()
        assert len(dispatcher._fleet.routable) == 3 and stats.num_lost_attempts == 20
        for _ in range(24):
            for engine in engines:
                if engine.held:
                    await engine.answer()
        assert {completion.finish_reason for completion in await asyncio.gather(*tasks)} == {"length"}


async def test_a_full_engine_rests_and_its_requests_go_elsewhere_while_what_it_has_goes_on() -> None:
    full, other = Failing(), Failing()
    async with over(full, other) as dispatcher:
        early = await begun(dispatcher, *(asked(f"e{i}", group=i) for i in range(4)))
        full.errors = {"r": fails(503)}
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=10 + i) for i in range(6)))
        await until(lambda: len(other.held) == 8)
        assert len(full.held) == 2 and dispatcher.dispatch_stats().num_lost_attempts == 0
        assert dispatcher.dispatch_stats().num_put_off >= 1
        full.errors = {}
        await full.answer()
        await routable(dispatcher, "engine-0")
        while full.held or other.held:
            await (full if full.held else other).answer()
        await asyncio.gather(*early, *tasks)
        assert dispatcher.dispatch_stats().num_completed == 10


async def test_full_everywhere_is_a_wait_until_one_token_is_to_be_had_again() -> None:
    engine = Failing(r=fails(503), trial=fails(503))
    async with over(engine) as dispatcher:
        [task] = await begun(dispatcher, asked("r"))
        await until(lambda: sum(name.startswith("trial") for name in engine.asked) >= 3)
        assert [name for name in engine.asked if name.startswith("r")] == ["r"], "the request itself is not the trial"
        engine.errors = {}
        await engine.answer()
        assert (await task).request_id == "r"


async def test_an_engine_that_fails_every_request_rests_and_what_it_has_in_flight_ends_well() -> None:
    bad, good = Failing(), Failing()
    async with over(bad, good, limits=replace(QUICK, in_flight=32)) as dispatcher:
        early = await begun(dispatcher, *(asked(f"e{i}", group=i) for i in range(8)))
        bad.errors = {"r": fails(500), "trial": fails(500)}
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=10 + i) for i in range(16)))
        await gone(dispatcher, "engine-0")
        await until(lambda: len(good.held) == 20)
        assert len(bad.held) == 4, "nothing that it has is thrown away"
        while bad.held or good.held:
            await (bad if bad.held else good).answer()
        await asyncio.gather(*early, *tasks)


async def test_what_dies_with_its_company_is_tried_apart_from_it_and_only_the_reason_is_given_up() -> None:
    engines = [Failing() for _ in range(4)]
    for engine in engines:
        engine.tells = False  # nothing had a token: all are suspected
    async with over(*engines, limits=replace(QUICK, most_kills=2)) as dispatcher:
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=i) for i in range(16)))
        first = next(engine for engine in engines if "r0" in engine.held)
        company = list(first.held)
        assert len(company) == 4
        await first.die()
        await until(lambda: all(any(name.split("~")[0] in company for name in engine.held) for engine in engines))
        for engine in engines:
            assert sum(name.split("~")[0] in company for name in engine.held) == 1, "one suspect an engine"
        second = next(engine for engine in engines if "r0~2" in engine.held)
        await second.die()
        with pytest.raises(
            RequestFailed, match=r"'r0' must leave its engines alive, got engine-.: it died; engine-.: it"
        ):
            await tasks[0]
        while not all(task.done() for task in tasks):
            for engine in engines:
                if engine.held:
                    await engine.answer()
            await asyncio.sleep(0)
        assert len([task.result() for task in tasks[1:]]) == 15


class Mortal(Failing):
    """Ends whatever it is asked while it is not `up`, and says so when it is asked how it is."""

    up = True

    async def ready(self) -> bool:
        return self.up

    async def generate(self, request: Request) -> Completion:
        if not self.up:
            raise PeerGone("it died")
        return await super().generate(request)


async def test_nothing_is_found_out_by_engines_that_something_else_ends_together() -> None:
    engines = [Mortal() for _ in range(2)]
    async with over(*engines, limits=replace(QUICK, most_kills=2)) as dispatcher:
        for engine in engines:
            engine.tells = False  # nothing had a token: all are suspected
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=i) for i in range(4)))
        for engine in engines:
            engine.up = False
        for engine in engines:
            await engine.die()
        await until(lambda: not dispatcher._fleet.routable)
        for engine in engines:
            engine.up = True
        while not all(task.done() for task in tasks):
            for engine in engines:
                if engine.held:
                    await engine.answer()
            await asyncio.sleep(0.001)
        assert len(await asyncio.gather(*tasks)) == 4


async def test_requests_that_had_tokens_when_their_engine_died_are_asked_again_at_once_and_together() -> None:
    engines = [Failing() for _ in range(2)]
    async with over(*engines, limits=replace(QUICK, most_kills=2)) as dispatcher:
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=i) for i in range(8)))
        await until(lambda: all(job.has_token for job in dispatcher._jobs.values()))
        await engines[0].die()
        await until(lambda: len(engines[0].held) + len(engines[1].held) == 8)
        while not all(task.done() for task in tasks):
            for engine in engines:
                if engine.held:
                    await engine.answer()
        assert len(await asyncio.gather(*tasks)) == 8


async def test_requests_that_engines_fail_beside_each_other_end_too_and_not_by_asking_without_rest() -> None:
    engines = [Failing(p=fails(500)) for _ in range(2)]
    async with over(*engines, limits=replace(QUICK, most_attempts=6)) as dispatcher:
        tasks = await begun(dispatcher, asked("p1", group=1), asked("p2", group=2))
        for task in tasks:
            with pytest.raises(RequestFailed):
                await task
        assert sum(len(engine.asked) for engine in engines) <= 2 * 6
        assert len(dispatcher._fleet.routable) == 2


async def test_a_suspect_that_waits_for_an_engine_of_its_own_keeps_nobody_else_waiting() -> None:
    engines = [Failing() for _ in range(2)]
    for engine in engines:
        engine.tells = False
    async with over(*engines) as dispatcher:
        tasks = await begun(dispatcher, *(asked(f"r{i}", group=i) for i in range(8)))
        await engines[0].die()
        await until(lambda: len(engines[0].held) + len(engines[1].held) == 6)  # two suspects on trial, two wait
        tasks += await begun(dispatcher, asked("late", group=20))
        assert "late" in {*engines[0].held, *engines[1].held}
        for task in tasks:
            task.cancel()
