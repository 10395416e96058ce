"""The coordinator's waiting code under many orders of its callbacks. RONDO_SCHEDULES=N runs N of each scenario."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.comm.bus.wakes import Wakes
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.waits import wait_for
from tests.comm.driver import STREAMS
from tests.comm.inprocess import InProcess, Store, put, put_scores
from tests.schedules import SeededLoop, Stuck, explore
from tests.strength import strength

NUM_SCHEDULES = int(os.environ.get("RONDO_SCHEDULES", strength(quick=200, full=1000)))


class LateWakes(Wakes):
    """The planted bug: a waiter registers one turn of the loop after it found no answer."""

    async def wait(self, ask: Callable[[], Any], *topics: str) -> Any:
        await asyncio.sleep(0)
        return await super().wait(ask, *topics)


def step_of_a_run(folder: Path, wakes: type[Wakes]) -> Callable[[], Coroutine[Any, Any, None]]:
    """Two replicas, both forward streams, two trainers, a waiter that gives up, and one for a version: all at once, one step."""
    numbers = itertools.count()

    async def scenario() -> None:
        store = Store()
        streams = (*STREAMS, replace(STREAMS[2], name="critic"))
        changes: Any = {"num_steps": 1, "groups_per_step": 2, "max_staleness": 0, "streams": streams}
        run = InProcess(folder / str(next(numbers)), store, **changes)
        try:
            await run.start()
            run.coordinator._wakes = wakes()
            names = ("rollout-0", "rollout-1", "actor_fwd-0", "advantages-0", "actor-0", "critic-0")
            first, second, fwd, advantages, actor, critic = [await run.bus(name) for name in names]

            async def rollout(bus: Any) -> None:
                while "end" not in (answer := await bus.call("lease", 1, [])):
                    for grant in answer["grants"]:
                        for sample in (0, 1):
                            put(bus, grant, [sample])
                            await asyncio.sleep(0)

            async def forward(bus: Any, stream: str) -> None:
                async for made in bus.stream(stream, tokens=1 << 20):
                    put_scores(bus, stream, made)
                    await bus.ack(made)

            async def train(bus: Any, role: str) -> None:
                await bus.call("commit", 0, 0, 7, [], role)
                await bus.call("await_version", 0)
                spans = []
                async for made in bus.stream(role, tokens=1 << 20, step=0):
                    spans += made.spans
                await bus.call("commit", 0, 1, 7, spans, role)
                await bus.call("await_version", 1)

            async def prove(bus: Any) -> None:
                await bus.call("await_version", 0)
                await bus.call("proved", "rollout.0", 0)

            async def impatient() -> None:
                asking = bus_call(first, "await_version", 5)
                with pytest.raises(DeadlineExceeded):
                    await wait_for(asking, name="version", peer="coordinator", deadline_s=1.0)

            acts = {
                "rollout-0": rollout(first), "rollout-1": rollout(second), "prove-0": prove(first), "prove-1": prove(second),
                "fwd": forward(fwd, "actor_fwd"), "advantages": forward(advantages, "advantages"), "actor": train(actor, "actor"),
                "critic": train(critic, "critic"), "impatient": impatient(),
            }  # fmt: skip
            async with asyncio.TaskGroup() as tasks:
                for name, act in acts.items():
                    tasks.create_task(act, name=name)
            assert run.coordinator.index.counts["trained"] == 2 and run.coordinator.index.imbalance() == ""
            assert len(run.coordinator._wakes) == 0, "a waiter was left behind"
            for bus in (first, second, fwd, advantages, actor, critic):
                bus.close()
        finally:
            await run.stop()
            store.close()

    return scenario


async def bus_call(bus: Any, *args: Any) -> Any:
    return await bus.call(*args)


def test_no_order_loses_a_wake_up_or_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distinct, failed = explore(step_of_a_run(tmp_path, Wakes), NUM_SCHEDULES)
    with capsys.disabled():
        print(f" [{distinct} distinct interleavings in {NUM_SCHEDULES} schedules]", end="")
    assert not failed, failed[:3]
    assert distinct > NUM_SCHEDULES // 2


def test_a_planted_lost_wake_up_is_found(tmp_path: Path) -> None:
    _, failed = explore(step_of_a_run(tmp_path, LateWakes), min(NUM_SCHEDULES, 100))
    assert any(error.startswith(Stuck.__name__) for _, error in failed)


def test_drain_ends_rounds_and_leaves_leases_to_their_callers_deadline(tmp_path: Path) -> None:
    numbers = itertools.count()

    async def scenario() -> None:
        store = Store()
        run = InProcess(tmp_path / str(next(numbers)), store, num_steps=2)
        try:
            await run.start()
            fwd, rollout = await run.bus("actor_fwd-0"), await run.bus("rollout-0")
            await fwd.join("actor_fwd", 64)
            lease = asyncio.create_task(rollout.call("lease", 1, []), name="lease")
            rounds = [asyncio.create_task(fwd.call("next_rounds", "actor_fwd", 0, 0), name=f"round{i}") for i in (0, 1)]
            draining = asyncio.create_task(run.coordinator.drain(), name="drain")
            for asked in rounds:
                assert await asked == {"end": True}
            await draining
            assert not lease.done()
            lease.cancel()
            await asyncio.gather(lease, return_exceptions=True)
            assert len(run.coordinator._wakes) == 0
            fwd.close()
            rollout.close()
        finally:
            await run.stop()
            store.close()

    _, failed = explore(scenario, min(NUM_SCHEDULES, 200))
    assert not failed, failed[:3]


def test_a_seed_gives_the_same_order_every_time(tmp_path: Path) -> None:
    def trace(seed: int, folder: str) -> tuple[int, int]:
        with SeededLoop(seed) as loop:
            loop.run_until_complete(step_of_a_run(tmp_path / folder / str(seed), Wakes)())
            return loop.trace, loop.num_turns

    assert [trace(seed, "first") for seed in range(5)] == [trace(seed, "again") for seed in range(5)]
