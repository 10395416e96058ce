"""The compute thread of a process that trains and scores: scoring fills the trainer's waits, and stands in its way once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from rondo.roles.training.compute_turns import Turns


class Thread:
    """A compute thread that writes down what ran on it, and whose scoring lasts until it is let go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.go = Event()
        self._thread = ThreadPoolExecutor(1)

    def run(self, name: str, *, held: bool = False) -> Awaitable[None]:
        def work() -> None:
            if held:
                self.go.wait(60)
            self.log.append(name)

        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self.go.set()
        self._thread.shutdown()


async def scoring(turns: Turns, thread: Thread, role: str, num: int, *, held: bool = False) -> None:
    for index in range(num):
        async with turns.scoring(role):
            await thread.run(f"{role} {index}", held=held)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - the log is filled by a thread
            await asyncio.sleep(0.001)


async def test_a_round_that_comes_while_both_roles_have_work_waits_for_one_micro_batch() -> None:
    turns, thread = Turns(), Thread()
    try:
        async with asyncio.TaskGroup() as tasks:
            async with turns.training():
                async with turns.waiting():
                    for role in ("reference", "actor_fwd"):
                        tasks.create_task(scoring(turns, thread, role, 3, held=True))
                    await settle()  # one of them is on the thread
                first, second = thread.run("round 0"), thread.run("round 1")  # it came
                thread.go.set()
                await first
                await second
                await settle()
                await thread.run("optimizer")
            await until(lambda: len(thread.log) == 9)
    finally:
        thread.close()
    assert thread.log[:4] == ["reference 0", "round 0", "round 1", "optimizer"]
    assert sorted(thread.log[4:]) == ["actor_fwd 0", "actor_fwd 1", "actor_fwd 2", "reference 1", "reference 2"]


async def test_a_round_that_is_there_at_once_lets_nobody_in_between() -> None:
    turns, thread = Turns(), Thread()
    try:
        async with turns.training():
            task = asyncio.create_task(scoring(turns, thread, "reference", 1))
            for index in range(3):
                async with turns.waiting():
                    pass  # it had been asked for ahead: nothing is awaited
                await thread.run(f"round {index}")
                await settle()
            assert thread.log == ["round 0", "round 1", "round 2"]
            async with turns.waiting():
                await task
    finally:
        thread.close()
    assert thread.log[-1] == "reference 0"


async def test_the_roles_take_turns_in_a_wait_and_a_process_without_a_trainer_never_stops_them() -> None:
    turns, thread = Turns(), Thread()
    try:
        await asyncio.gather(*(scoring(turns, thread, role, 2) for role in ("reference", "actor_fwd")))
    finally:
        thread.close()
    assert thread.log == ["reference 0", "actor_fwd 0", "reference 1", "actor_fwd 1"]


async def test_a_wait_outside_of_a_step_leaves_the_thread_to_the_others() -> None:
    turns, thread = Turns(), Thread()
    try:
        async with turns.waiting():
            pass
        async with asyncio.timeout(60):
            await scoring(turns, thread, "reference", 1)
    finally:
        thread.close()
