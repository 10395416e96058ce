"""The rollout role between two answers of the coordinator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease
from rondo.roles.sampling.leases import Progress
from rondo.runtime.records.timeline import span


@pytest.mark.parametrize("error", [None, ValueError("planted")])
async def test_a_replica_that_is_asked_to_leave_leaves_an_evaluation_and_one_that_fails_ends_it(
    error: Exception | None,
) -> None:
    ended = list[str]()

    class Role(RolloutRole):
        async def _next(self, room: int) -> dict[str, Any]:
            return {"evaluate": {"version": 0}}

        async def _evaluate(self, **_: Any) -> None:  # type: ignore[override]
            if error is not None:
                raise error
            self._ctx.stopping.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

    ctx: Any = SimpleNamespace(stopping=asyncio.Event(), span=lambda name, **_: span(name, "rollout"))
    role = Role(ctx)
    role._job = SimpleNamespace(  # type: ignore[assignment]
        config=SimpleNamespace(rollout=SimpleNamespace(samples_per_prompt=2, max_episodes=None, agent=None))
    )
    role._replica, role._progress = SimpleNamespace(num_slots=4), Progress(1.0)  # type: ignore[assignment]
    async with asyncio.timeout(60):
        if error is None:
            async with asyncio.TaskGroup() as tasks:
                await role._work(tasks)
            assert ended == ["cancelled"]
            return
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as tasks:
                await role._work(tasks)
        assert raised.value.exceptions == (error,)


async def test_what_is_granted_in_the_moment_of_a_stop_is_given_back() -> None:
    calls = list[Any]()

    class Role(RolloutRole):
        async def _next(self, room: int) -> dict[str, Any]:
            self._ctx.stopping.set()
            grants = [
                {"group": 7 + at, "epoch": 0, "step": 1, "position": at, "ring": "ring", "have": []} for at in range(2)
            ]
            return {"grants": grants}

    async def called(*asked: Any) -> None:
        calls.append(asked)

    async def fill(lease: Lease) -> None:
        await asyncio.Event().wait()

    ctx: Any = SimpleNamespace(
        stopping=asyncio.Event(), span=lambda name, **_: span(name, "rollout"), progress=lambda: None
    )
    role = Role(ctx)
    role._job = SimpleNamespace(  # type: ignore[assignment]
        bus=SimpleNamespace(call=called),
        config=SimpleNamespace(rollout=SimpleNamespace(samples_per_prompt=2, max_episodes=None, agent=None)),
    )
    role._replica, role._progress = SimpleNamespace(num_slots=4), Progress(1.0)  # type: ignore[assignment]
    role._groups = SimpleNamespace(fill=fill)  # type: ignore[assignment]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await role._work(tasks)
    assert calls == [("abandon", 7, 0), ("abandon", 8, 0)]
    assert not role._running
