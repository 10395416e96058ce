"""Every wait has a name and a deadline, and is listed while it lasts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rondo.runtime import waits as waits_module
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.waits import Pending, Waits, blocking, pending, set_waiter, totals, wait_for, waiter, waiting


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_wait_is_listed_while_it_lasts() -> None:
    clock = Clock()
    waits = Waits(clock)
    waits.waiter = "rollout-0.0"
    async with waiting("call lease", peer="coordinator", deadline_s=60, waits=waits):
        clock.now += 2.5
        assert waits.pending() == (Pending("call lease", "rollout-0.0", "coordinator", 100.0, 60, 2.5),)
    assert waits.pending() == ()


async def test_pending_waits_come_oldest_first() -> None:
    clock = Clock()
    waits = Waits(clock)
    async with waiting("first", peer="a", deadline_s=None, waits=waits):
        clock.now += 1
        async with waiting("second", peer="b", deadline_s=None, waits=waits):
            assert [wait.name for wait in waits.pending()] == ["first", "second"]


async def test_totals_sum_finished_and_pending_seconds_by_name() -> None:
    clock = Clock()
    waits = Waits(clock)
    for _ in range(2):
        async with waiting("round", peer="coordinator", deadline_s=9, waits=waits):
            clock.now += 3
    async with waiting("round", peer="coordinator", deadline_s=9, waits=waits):
        clock.now += 1
        async with waiting("proof", peer="actor-0", deadline_s=9, waits=waits):
            clock.now += 0.5
            assert waits.totals() == {"round": 7.5, "proof": 0.5}
    assert waits.totals() == {"round": 7.5, "proof": 0.5}


async def test_past_the_deadline_the_body_is_cancelled_and_the_error_names_both_sides() -> None:
    waits = Waits()
    waits.waiter = "actor-0.0"
    ended = []
    with pytest.raises(DeadlineExceeded) as caught:
        async with waiting("round", peer="coordinator", deadline_s=0.0, waits=waits):
            try:
                await forever()
            finally:
                ended.append("body")
    error = caught.value
    assert (error.name, error.waiter, error.peer, error.deadline_s) == ("round", "actor-0.0", "coordinator", 0.0)
    assert ended == ["body"]
    assert waits.pending() == ()


async def test_after_a_deadline_the_task_can_wait_again() -> None:
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            async with waiting("round", peer="coordinator", deadline_s=0):
                await forever()
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_the_error_names_who_is_still_missing_when_the_body_says_so() -> None:
    with pytest.raises(DeadlineExceeded, match=r"for 'actor-0\.1'"):
        async with waiting("gather", peer="actor-0", deadline_s=0) as wait:
            wait.peer = "actor-0.1"
            await forever()


async def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    waits = Waits()

    async def body() -> None:
        async with waiting("round", peer="coordinator", deadline_s=60, waits=waits):
            await forever()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waits.pending() == ()


async def test_a_cancellation_from_outside_wins_over_a_deadline_at_the_same_moment() -> None:
    async def body() -> None:
        async with waiting("round", peer="coordinator", deadline_s=0):
            try:
                await forever()
            finally:
                task.cancel()

    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_bodys_own_error_passes_and_ends_the_wait() -> None:
    waits = Waits()
    with pytest.raises(KeyError, match="mine"):
        async with waiting("round", peer="coordinator", deadline_s=60, waits=waits):
            raise KeyError("mine")
    assert waits.pending() == ()


async def test_of_two_nested_waits_the_one_past_its_deadline_is_named() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        async with waiting("outer", peer="a", deadline_s=0):
            async with waiting("inner", peer="b", deadline_s=60):
                await forever()
    assert caught.value.name == "outer"


async def test_wait_for_gives_the_result_or_cancels_the_awaitable() -> None:
    async def soon() -> int:
        return 7

    assert await wait_for(soon(), name="proof", peer="actor-0", deadline_s=60) == 7
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.raises(DeadlineExceeded, match="'proof'"):
        await wait_for(future, name="proof", peer="actor-0", deadline_s=0)
    assert future.cancelled()


async def test_a_wait_belongs_to_a_task() -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def outside_of_any_task() -> None:
        step = waiting("round", peer="coordinator", deadline_s=1).__aenter__()
        try:
            step.send(None)
        except RuntimeError as error:
            failed.set_result(error)

    asyncio.get_running_loop().call_soon(outside_of_any_task)
    assert "Use blocking() in threads" in str(await failed)


def test_a_blocking_wait_of_a_thread_is_listed_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(waits_module.PROCESS, "clock", clock)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with blocking("handover", peer="supervisor", deadline_s=10):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        inside.wait()
        clock.now += 2.5
        assert [(wait.name, wait.peer, wait.deadline_s) for wait in pending()] == [("handover", "supervisor", 10)]
        assert totals()["handover"] == 2.5
    finally:
        leave.set()
        thread.join()
    assert pending() == () and totals()["handover"] == 2.5


def test_waits_of_many_threads_lose_no_seconds() -> None:
    clock = Clock()
    waits = Waits(clock)
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait()
        for _ in range(500):
            wait = waits.begin("call add", "counter", 1.0)
            wait.since -= 1.0
            waits.end(wait)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waits.totals() == {"call add": 4000.0}
    assert waits.pending() == ()


def test_a_process_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module.PROCESS, "waiter", "main")
    assert waiter() == "main"
    set_waiter("reference-0.0")
    assert waiter() == "reference-0.0"


async def test_a_deadline_counts_from_when_the_peer_last_moved() -> None:
    clock = Clock()
    waits = Waits(clock)
    asked: list[float] = []

    def moved() -> float:
        asked.append(clock.now)
        if len(asked) == 3:
            clock.now += 1  # from here on it stands
        return min(clock.now, 100.0)

    with pytest.raises(DeadlineExceeded, match=r"wait 'generate' of 'main' for 'engine' must end within 0\.01 s"):
        async with waiting("generate", peer="engine", deadline_s=0.01, waits=waits, moved=moved):
            await forever()
    assert asked == [100.0, 100.0, 100.0] and waits.pending() == ()
