"""The rollout role's leases against a real coordinator; what it does inside a group is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from rondo.comm.bus.bus import Bus
from rondo.roles.data.datasets import RowError
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease
from rondo.roles.sampling.leases import Progress
from rondo.runtime.records.timeline import span
from tests.comm.served import Served, prove, put_group, served

Script = Callable[[Lease], Awaitable[None]]


class Scripted(RolloutRole):
    """A replica that fills its groups as `script` says."""

    def __init__(self, bus: Bus, script: Script) -> None:
        context = SimpleNamespace(
            stopping=asyncio.Event(), progress=lambda: None, span=lambda name, **_: span(name, "rollout"), rank=0
        )
        super().__init__(cast(Any, context))
        rollout = SimpleNamespace(samples_per_prompt=2, max_episodes=None, agent=None)
        self._replica = cast(Any, SimpleNamespace(num_slots=4))
        self._job = cast(Any, SimpleNamespace(bus=bus, config=SimpleNamespace(rollout=rollout)))
        self._progress = Progress(reward_s=10, left=self._fewer.set)
        self._groups = cast(Any, SimpleNamespace(fill=script))


async def work(run: Served, script: Callable[[Bus, Lease], Awaitable[None]]) -> None:
    """Let one replica work until the three groups of step 0 are ready, then ask it to leave."""
    bus, actor = await run.bus("rollout-0"), await run.bus("actor-0")
    await actor.call("commit", 0, 0, 7, [])
    await prove(bus)

    async def fill(lease: Lease) -> None:
        await script(bus, lease)
        await bus.call("renew", [])  # the coordinator has seen every put of this replica
        if run.coordinator.index.counts["ready"] == 3:
            role._ctx.stopping.set()

    role = Scripted(bus, fill)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await role._work(tasks)
    assert role._running == {} and run.coordinator.index.counts["ready"] == 3
    assert [ring.reserved for ring in run.coordinator.index.space.rings.values() if ring.reserved] == []


async def test_a_group_whose_data_failed_comes_back_to_the_same_replica_under_a_new_lease() -> None:
    async def script(bus: Bus, lease: Lease) -> None:
        if lease.epoch == 0:
            raise RowError("planted")
        put_group(bus, {"ring": lease.ring, "group": lease.group, "epoch": lease.epoch}, [0, 1])

    async with served(max_staleness=0) as run:
        await work(run, script)


async def test_a_lease_lost_while_its_last_samples_are_put_leaves_no_room_reserved() -> None:
    async with served(max_staleness=0) as run:

        async def script(bus: Bus, lease: Lease) -> None:
            if lease.epoch == 0:
                run.coordinator._emit({"event": "lose", "group": lease.group, "epoch": 0, "why": "no progress"})
            put_group(bus, {"ring": lease.ring, "group": lease.group, "epoch": lease.epoch}, [0, 1])

        await work(run, script)
        assert run.coordinator.index.refused_rows == 6
