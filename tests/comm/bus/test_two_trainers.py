"""Two trainable roles when a run is stopped: both leave with the same version, whatever one of them alone had trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.comm.bus.bus import Bus
from rondo.runtime.errors import Stopping
from tests.comm.driver import STREAMS
from tests.comm.inprocess import InProcess, Store, ask, put, put_scores

ROLES = ("actor", "critic")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[InProcess, dict[str, Bus]]]:
    """A step of one prompt group whose samples are there, scored, and trained by nobody yet. The actor alone reads log-probs."""
    store = Store()
    critic = replace(STREAMS[2], name="critic", inputs=("tokens", "advantages"))
    run = InProcess(folder, store, groups_per_step=1, max_staleness=0, streams=(*STREAMS, critic))
    await run.start()
    names = ("rollout-0", "advantages-0", "actor_fwd-0", *(f"{role}-0" for role in ROLES))
    buses = {name.rpartition("-")[0]: await run.bus(name) for name in names}
    for role in ROLES:
        await buses[role].call("commit", 0, 0, 7, [], role)
        await buses[role].join(role, 1 << 20)
    await buses["rollout"].call("proved", "rollout.0", 0)
    (grant,) = (await ask(buses["rollout"].call("lease", 8, [])))["grants"]
    put(buses["rollout"], grant, [0, 1])
    await score(buses["advantages"], "advantages")
    yield run, buses
    await run.stop()
    store.close()


async def score(bus: Bus, stream: str) -> None:
    await bus.join(stream, 1 << 20)
    for made in bus._rounds(stream, (await ask(bus.call("next_rounds", stream, 0, 0)))["rounds"]):
        put_scores(bus, stream, made)
        await bus.ack(made)


async def rounds(bus: Bus, role: str) -> Any:
    return await ask(bus.call("next_rounds", role, 0, 0, 0))


async def prepare(bus: Bus, role: str) -> dict[str, Any]:
    found: dict[str, Any] = await bus.call("commit", 0, 1, 8, [[0, 0, 0, 2]], role)
    return found


def committed(run: InProcess, role: str) -> asyncio.Task[dict[str, Any]]:
    """What a role waits for that has prepared version 1."""
    return asyncio.create_task(run.coordinator.await_version(f"{role}-0", 1, 1, commits=True))


@pytest.mark.parametrize("first", ROLES)
async def test_a_stop_goes_on_until_the_other_has_trained_what_one_has(tmp_path: Path, first: str) -> None:
    (other,) = set(ROLES) - {first}
    async with opened(tmp_path) as (run, buses):
        await score(buses["actor_fwd"], "actor_fwd")
        assert (await rounds(buses[first], first))["rounds"]
        await prepare(buses[first], first)
        waits = committed(run, first)
        await run.coordinator.drain()
        assert (await rounds(buses[other], other))["rounds"][0]["spans"] == [[0, 0, 0, 2]]
        assert await prepare(buses[other], other) == {"version": 1}
        assert await waits == {"version": 1}
        for role in ROLES:
            assert await ask(buses[role].call("next_rounds", role, 0, 0, 1)) == {"end": True}


async def test_what_one_alone_has_trained_is_withdrawn_where_the_other_lacks_something(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, buses):
        assert (await rounds(buses["critic"], "critic"))["rounds"]
        await prepare(buses["critic"], "critic")
        waits = committed(run, "critic")
        await run.coordinator.drain()
        assert await rounds(buses["actor"], "actor") == {"end": True}  # its log-probs do not come any more
        with pytest.raises(Stopping, match="left its step"):
            await waits
        assert run.coordinator.index.version == 0


async def test_a_coordinator_that_starts_again_knows_that_one_has_left_the_step(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, buses):
        assert (await rounds(buses["critic"], "critic"))["rounds"]
        await prepare(buses["critic"], "critic")
        await run.coordinator.drain()
        assert await rounds(buses["actor"], "actor") == {"end": True}
        await run.stop()
        run.roster.draining = True
        await run.start()
        with pytest.raises(Stopping, match="left its step"):
            await ask(committed(run, "critic"))


async def test_who_was_told_to_leave_a_step_first_leaves_nothing_to_commit_of_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, buses):
        assert (await rounds(buses["critic"], "critic"))["rounds"]
        await run.coordinator.drain()
        assert await rounds(buses["actor"], "actor") == {"end": True}
        with pytest.raises(Stopping, match="version 1 must be made by every trainable role"):
            await prepare(buses["critic"], "critic")
        assert run.coordinator.index.prepared == {} and run.coordinator.index.version == 0


async def test_who_waits_for_what_one_role_begins_with_hears_of_it_before_the_commit(tmp_path: Path) -> None:
    async with opened(tmp_path) as (run, buses):
        waits = asyncio.create_task(run.coordinator.await_version("critic-0", 1, 1, by="actor"))
        assert (await rounds(buses["critic"], "critic"))["rounds"]
        await prepare(buses["critic"], "critic")
        assert not waits.done()
        await score(buses["actor_fwd"], "actor_fwd")
        await rounds(buses["actor"], "actor")
        await prepare(buses["actor"], "actor")
        assert await waits == {"version": 1}
