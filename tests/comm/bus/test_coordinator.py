from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from rondo.comm.bus.audit import audit
from rondo.comm.bus.coordinator import HOLD_S
from rondo.comm.bus.index import Index
from rondo.comm.bus.rounds import Stream
from rondo.comm.groups.epochs import GroupSpec
from rondo.comm.groups.meeting import fields_of
from rondo.comm.ring.spans import rows_of, spans_of
from rondo.runtime.actors.transport import MAX_HEADER_BYTES
from rondo.runtime.errors import NotYet, OutOfSpace, Refused, Stopping
from rondo.runtime.memory.segments import QUICK_BYTES
from tests.comm.served import ROW_BYTES, Served, prove, put_group, score, served
from tests.strength import strength


async def train(run: Served, bus, step: int) -> list[list[int]]:
    ids = []
    async for made in bus.stream("actor", tokens=1 << 20, step=step):
        for row in made.rows:
            assert row.array("tokens")[0] == 100 * row.group + row.sample == row.array("log_probs")[0]
        bus.check(made)
        ids += made.spans
    await bus.call("commit", 0, step + 1, 7, ids)
    return rows_of(ids)


async def whole_step(run: Served, rollout, fwd, advantages, actor, step: int) -> list[list[int]]:
    grants = []
    while len(grants) < 3:
        grants += (await rollout.call("lease", 8, []))["grants"]
    assert {grant["step"] for grant in grants} <= {step, step + 1}
    for grant in grants:
        put_group(rollout, grant, [0, 1])
    await asyncio.gather(score(fwd, "actor_fwd", "log_probs", 1), score(advantages, "advantages", "advantages", 1))
    return await train(run, actor, step)


async def everyone(run: Served):
    buses = [await run.bus(name) for name in ("rollout-0", "actor_fwd-0", "advantages-0", "actor-0")]
    await buses[3].call("commit", 0, 0, 7, [])
    await prove(buses[0])
    return buses


async def test_rows_go_from_a_lease_through_every_role_to_a_commit():
    async with served(max_staleness=0) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        assert len(await whole_step(run, rollout, fwd, advantages, actor, 0)) == 6
        found = audit(run.folder / "journal", 2, 3)
        assert (found.num_admitted, found.num_put, found.num_trained) == (6, 6, 6)
        assert (found.num_lost, found.num_trained_twice, found.num_unexpected) == (0, 0, 0)
        rings = run.coordinator.status()["rings"]
        assert {ring["used"] for ring in rings.values()} == {0} and {ring["reserved"] for ring in rings.values()} == {0}


async def test_a_coordinator_that_dies_between_any_two_acts_goes_on_where_it_was():
    async with served(max_staleness=0) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        (first, *rest) = (await rollout.call("lease", 8, []))["grants"]
        put_group(rollout, first, [1])
        await run.restart()
        put_group(rollout, first, [0])
        for grant in rest:
            put_group(rollout, grant, [0, 1])
        await run.restart()  # puts that nobody had read yet are found in the rings
        assert run.coordinator.index.counts["ready"] == 3
        await score(fwd, "actor_fwd", "log_probs", 1)
        await run.restart()
        await score(advantages, "advantages", "advantages", 1)
        before = run.coordinator.index.dump()
        await run.restart()
        assert run.coordinator.index.dump() == before
        assert len(await train(run, actor, 0)) == 6
        await run.restart()
        assert run.coordinator.index.version == 1 and run.coordinator.index.imbalance() == ""


async def test_a_repeated_commit_gets_the_same_answer_and_a_late_or_partial_one_is_refused():
    async with served(max_staleness=0) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        ids = spans_of(await whole_step(run, rollout, fwd, advantages, actor, 0))
        assert (await actor.call("commit", 0, 1, 7, ids))["version"] == 1
        with pytest.raises(Refused, match="must make version 2"):
            await actor.call("commit", 0, 5, 7, ids)
        with pytest.raises(Refused, match="every row of its step once"):
            await actor.call("commit", 0, 2, 7, ids)
        with pytest.raises(Refused, match="attempt 0"):
            await actor.call("commit", 3, 2, 7, ids)


async def test_leases_wait_for_a_proved_version_within_the_bound():
    async with served(max_staleness=0) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        await whole_step(run, rollout, fwd, advantages, actor, 0)
        asking = asyncio.create_task(rollout.call("lease", 8, []))
        await rollout.call("renew", [])
        assert not asking.done()  # version 0 is one behind step 1
        await prove(rollout, 1)
        assert {grant["step"] for grant in (await asking)["grants"]} == {1}


async def test_a_dead_replica_s_groups_go_to_another_which_makes_only_what_is_missing():
    async with served(max_staleness=0) as run:
        rollout, *_ = await everyone(run)
        other = await run.bus("rollout-1")
        await prove(other)
        first, *_ = (await rollout.call("lease", 8, []))["grants"]
        put_group(rollout, first, [1])
        await run.die("rollout-0")
        again = next(g for g in (await other.call("lease", 8, []))["grants"] if g["group"] == first["group"])
        assert again["epoch"] == first["epoch"] + 1 and again["have"] == [[1, 1.0, 4, 0]]
        with pytest.raises(Refused, match="living incarnation"):
            await rollout.call("renew", [])


async def test_each_rank_of_a_replica_has_leases_of_its_own_under_weights_that_it_proved_itself():
    async with served(max_staleness=0) as run:
        actor, both = await run.bus("actor-0"), [await run.bus("rollout-0", rank=rank, num_ranks=2) for rank in (0, 1)]
        await actor.call("commit", 0, 0, 7, [])
        await prove(both[0])
        asking = asyncio.create_task(both[1].call("lease", 8, [], 1))
        await both[0].call("renew", [])
        assert not asking.done()  # its own engine has proved nothing yet
        await prove(both[1])
        other = (await asking)["grants"]
        mine = (await both[0].call("lease", 8, [], 0))["grants"]
        assert [len(other), len(mine)] == [2, 1]  # of the three groups of a step each has its share
        assert {grant["ring"] for grant in mine} == {"ring/rollout-0/0"}
        assert {grant["ring"] for grant in other} == {"ring/rollout-0/1"}
        assert (await both[1].call("lease", 8, [], 1))["grants"] == other  # whose answer was lost; not those of rank 0
        for bus, grants in zip(both, (mine, other), strict=True):
            for grant in grants:
                put_group(bus, grant, [0, 1])
        await both[0].call("renew", [])
        assert run.coordinator.index.counts["ready"] == 3


async def test_the_death_of_a_replica_gives_the_leases_of_all_its_ranks_back():
    async with served(max_staleness=0) as run:
        actor, both = await run.bus("actor-0"), [await run.bus("rollout-0", rank=rank, num_ranks=2) for rank in (0, 1)]
        await actor.call("commit", 0, 0, 7, [])
        for bus in both:
            await prove(bus)
        for rank, bus in enumerate(both):
            await bus.call("lease", 8, [], rank)
        assert run.coordinator.index.counts["running"] == 3
        await run.die("rollout-0")
        assert run.coordinator.index.counts["waiting"] == 3
        other = await run.bus("rollout-1")
        await prove(other)  # the only engine left has all of them
        assert len((await other.call("lease", 8, []))["grants"]) == 3


async def test_who_asks_first_leaves_the_others_their_share_and_gets_more_when_it_is_quick():
    async with served(max_staleness=0) as run:
        rollout, *_ = await everyone(run)
        other = await run.bus("rollout-1")
        await prove(other)
        first = (await rollout.call("lease", 8, []))["grants"]
        assert len(first) == 2
        held = [[grant["group"], grant["epoch"]] for grant in first]
        asking = asyncio.create_task(rollout.call("lease", 8, held))
        await rollout.call("renew", [])
        assert not asking.done()
        put_group(rollout, first[0], [0, 1])  # the other has not come for its share meanwhile
        assert len((await asking)["grants"]) == 1


async def test_a_lease_without_progress_is_lost_and_its_late_put_refused():
    async with served(max_staleness=0) as run:
        rollout, *_ = await everyone(run)
        first, second, _ = (await rollout.call("lease", 8, []))["grants"]
        run.clock = 90.0
        await rollout.call("renew", [[second["group"], 0]])
        run.clock = 150.0
        run.coordinator.tick()
        assert run.coordinator.index.groups[first["group"]].state == "waiting"
        assert run.coordinator.index.groups[second["group"]].state == "running"
        both = [[first["group"], 0], [second["group"], 0]]
        assert (await rollout.call("renew", [], both))["lost"] == [
            [first["group"], 0]
        ]  # told without progress of its own
        put_group(rollout, first, [0, 1])
        await rollout.call("abandon", first["group"], 0)
        assert run.coordinator.index.refused_rows == 2


async def test_a_full_ring_holds_back_younger_steps_and_never_the_oldest_one():
    # Room for five groups of two samples; a step is three groups.
    async with served(max_staleness=2, ring_bytes=5 * 2 * ROW_BYTES + 4096, num_steps=8) as run:
        rollout, *_ = await everyone(run)
        grants = (await rollout.call("lease", 99, []))["grants"]
        assert 3 <= len(grants) <= 5 and {g["ring"] for g in grants} == {"ring/rollout-0/0"}
        oldest = [g for g in grants if g["step"] == 0]
        for grant in oldest[:2]:
            await rollout.call("settle", grant["group"], 0, "filtered", "equal rewards")
        for grant in [*grants[3:], oldest[2]]:
            put_group(rollout, grant, [0, 1])
        # Fill what the filtered groups gave back with younger steps, then ask for their replacements of step 0.
        run.coordinator.index.space.reserve(
            "other", "ring/rollout-0/0", [run.coordinator.index.space.rings["ring/rollout-0/0"].capacity]
        )
        again = (await rollout.call("lease", 2, []))["grants"]
        assert {g["step"] for g in again} == {0} and all(g["ring"].startswith("overflow/") for g in again)
        for grant in again:
            put_group(rollout, grant, [0, 1])
        await rollout.call("renew", [])
        assert run.coordinator.index.counts["ready"] == len(grants[3:]) + 1 + 2
        names = [name for name, _ in run.segments.stats().segments if name.startswith("overflow/")]
        assert len(names) == 2


async def test_an_overflow_ring_is_taken_away_when_it_is_empty():
    async with served(max_staleness=0) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        run.coordinator.index.space.reserve(
            "other", "ring/rollout-0/0", [run.coordinator.index.space.rings["ring/rollout-0/0"].capacity]
        )
        await whole_step(run, rollout, fwd, advantages, actor, 0)
        assert [n for n, _ in run.segments.stats().segments if n.startswith("overflow/")] == []
        assert run.coordinator.index.version == 1


async def test_memory_that_a_killed_coordinator_made_for_an_overflow_ring_is_not_taken_for_a_new_one():
    async with served(max_staleness=0) as run:
        rollout, *_ = await everyone(run)
        run.client().segment("overflow/rollout-0/0/0.0", 8192)  # made, and killed before the journal had it
        run.coordinator.index.space.reserve(
            "other", "ring/rollout-0/0", [run.coordinator.index.space.rings["ring/rollout-0/0"].capacity]
        )
        (grant, *_) = (await rollout.call("lease", 1, []))["grants"]
        assert grant["ring"] == "overflow/rollout-0/0/0.0"
        assert run.coordinator.index.space.rings[grant["ring"]].capacity > 8192
        put_group(rollout, grant, [0, 1])
        await rollout.call("renew", [])
        assert run.coordinator.index.counts["ready"] == 1


async def test_a_member_that_died_while_no_coordinator_ran_ends_its_process_groups_epoch():
    async with served(max_staleness=0) as run:
        for name in ("actor-0", "rollout-0"):
            await run.bus(name)
        spec = fields_of(GroupSpec("weights", ("actor-0/0", "rollout-0/0")))
        joining = [run.coordinator.meet_group(spec, f"{name}/0", 1, 0, 60.0) for name in ("actor-0", "rollout-0")]
        epoch, _ = await asyncio.gather(*joining)
        await run.stop()
        run.roster.dead = [["rollout-0", 1]]
        run.roster.alive.pop("rollout-0")
        await run.start()
        over = await asyncio.wait_for(run.coordinator.watch_group(spec, epoch["epoch"], epoch["lives"]), 60)
        assert over["missing"] == ["rollout-0/0"]


async def test_weights_are_held_until_proved_and_a_dead_holder_lets_go():
    async with served(max_staleness=0) as run:
        rollout, *_, actor = await everyone(run)
        for version in (0, 1):
            slot = (await actor.call("begin_publish", version))["slot"]
            await actor.call("end_publish", slot, version, 40 + version)
        held = await rollout.call("weights", "rollout.0", -1)
        assert (held["version"], held["checksum"]) == (1, 41)
        slot = (await actor.call("begin_publish", 2))["slot"]
        assert slot != held["slot"]
        await actor.call("end_publish", slot, 2, 42)
        waiting = asyncio.create_task(actor.call("begin_publish", 3))
        await actor.call("committed")
        assert not waiting.done()  # one slot is held, the other is the newest
        await run.die("rollout-0")
        assert (await waiting)["slot"] == held["slot"]


async def test_a_reader_that_asks_for_it_is_told_once_of_a_version_that_is_being_written():
    async with served(max_staleness=0) as run:
        rollout, *_, actor = await everyone(run)
        waiting = asyncio.create_task(rollout.call("weights", "rollout.0", -1, -1))
        slot = (await actor.call("begin_publish", 0))["slot"]
        assert await waiting == {"coming": slot, "version": 0, "attempt": 0}
        waits = [
            asyncio.create_task(rollout.call("weights", *asked)) for asked in (("rollout.0", -1, 0), ("rollout.1", -1))
        ]
        await actor.call("committed")
        assert not any(task.done() for task in waits)
        await actor.call("end_publish", slot, 0, 40)
        assert [(held["slot"], held["checksum"]) for held in await asyncio.gather(*waits)] == [(slot, 40)] * 2


async def test_an_overflow_ring_left_empty_by_a_death_is_taken_away_at_the_next_start():
    async with served(max_staleness=0) as run:
        rollout, *_ = await everyone(run)
        (first, *_) = (await rollout.call("lease", 8, []))["grants"]
        # Killed between the ring's event and the grant's; a put comes while nobody looks.
        run.coordinator._make_ring("overflow/rollout-0/0/0.0", 1 << 16, "rollout-0", overflow=True)
        await run.stop()
        put_group(rollout, first, [0, 1])
        await run.start()
        assert run.coordinator.index.counts["ready"] == 1
        assert [name for name, _ in run.segments.stats().segments if name.startswith("overflow/")] == []


@pytest.mark.parametrize("why", ["straggler", "surplus", "filtered"])
async def test_a_group_that_ends_under_its_holder_keeps_its_room_until_the_holder_stopped(why: str) -> None:
    async with served(max_staleness=0, spare_groups=1) as run:
        object.__setattr__(run.config, "straggler_deadline_s", 10.0)
        rollout, fwd, advantages, actor = await everyone(run)
        *rest, late = (await rollout.call("lease", 8, []))["grants"]
        index = run.coordinator.index
        if why == "filtered":
            await rollout.call("settle", late["group"], 0, "filtered", "equal rewards")
            assert index.space.rings[late["ring"]].reserved.keys() == {f"group.{grant['group']}.0" for grant in rest}
            return
        for grant in rest:
            put_group(rollout, grant, [0, 1])
        await rollout.call("renew", [])
        if why == "straggler":
            run.clock = 50.0
            run.coordinator.tick()
            assert index.counts["failed"] == 1
        else:
            await asyncio.gather(
                score(fwd, "actor_fwd", "log_probs", 1), score(advantages, "advantages", "advantages", 1)
            )
            await train(run, actor, 0)
            assert index.counts["surplus"] == 1
        held = f"group.{late['group']}.0"
        assert index.space.rings[late["ring"]].reserved.keys() == {held}
        put_group(rollout, late, [0, 1])
        await rollout.call("abandon", late["group"], 0)
        assert index.refused_rows == 2 and not index.space.rings[late["ring"]].reserved


async def test_evaluations_come_before_the_first_lease_and_after_the_last_commit():
    async with served(max_staleness=0, num_steps=1, evaluated=True) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        parts = [{"label": "start", "version": 0, "part": part, "of": 2} for part in range(3)]
        for part in parts[:2]:  # two engines; the other has not come yet
            for _ in range(2):  # its answer was lost
                assert (await rollout.call("lease", 8, []))["evaluate"] == part
            await rollout.call("evaluated_part", "start", part["part"], {"rewards": [part["part"]]})
        whole = {"parts": [{"rewards": [0]}, {"rewards": [1]}]}
        assert (await rollout.call("lease", 8, []))["evaluate"] == parts[2] | whole
        await rollout.call("evaluated", "start", {"version": 0, "reward": 0.25, "num_prompts": 4})
        assert run.coordinator.index.evaluation_parts == {}
        await whole_step(run, rollout, fwd, advantages, actor, 0)
        asking = asyncio.create_task(rollout.call("lease", 8, []))
        await prove(rollout, 1)
        assert (await asking)["evaluate"] == {"label": "end", "version": 1, "part": 0, "of": 2}
        await rollout.call("evaluated", "end", {"version": 1, "reward": 0.5, "num_prompts": 4})
        assert await rollout.call("lease", 8, []) == {"end": True}
        assert "num_prompts" not in str(run.coordinator.status())
        told = [run.coordinator._reports.get_nowait() for _ in range(run.coordinator._reports.qsize())]
        # What was found is told once, and a commit of as much as there are steps tells no more than that it was.
        assert [data for kind, data in told if kind == "committed"] == [
            {"version": version, "checksums": {"actor": 7}} for version in range(2)
        ]
        assert [data["evaluation"]["label"] for kind, data in told if kind == "metrics"] == ["start", "end"]
        assert await actor.call("next_rounds", "actor", 0, 0, 1) == {"end": True}


async def test_readers_see_views_of_the_ring_and_stale_ones_are_found_out():
    async with served(max_staleness=0) as run:
        rollout, fwd, *_ = await everyone(run)
        for grant in (await rollout.call("lease", 8, []))["grants"]:
            put_group(rollout, grant, [0, 1])
        async for made in fwd.stream("actor_fwd", tokens=1 << 20):
            view = made.rows[0].array("tokens")
            assert not view.flags.writeable and view.base is not None
            assert isinstance(np.asarray(view), np.ndarray)
            fwd.check(made)
            break


async def test_a_drained_bus_ends_streams_at_the_same_round_for_every_rank() -> None:
    async with served(max_staleness=0) as run:
        rollout, fwd, *_ = await everyone(run)
        await fwd.join("actor_fwd", 1 << 20)
        asking = asyncio.create_task(fwd.call("next_rounds", "actor_fwd", 0, 0))
        await rollout.call("renew", [])
        assert not asking.done()
        await run.ref("coordinator").call("drain")
        assert await asking == {"end": True}


async def test_who_waits_for_the_first_version_is_told_that_the_run_is_being_stopped_unless_it_makes_it() -> None:
    async with served(max_staleness=0) as run:
        rollout, fwd, actor = [await run.bus(name) for name in ("rollout-0", "actor_fwd-0", "actor-0")]
        waits = [
            asyncio.create_task(rollout.call("weights", "rollout.0", -1)),
            asyncio.create_task(fwd.call("await_version", 0)),
            asyncio.create_task(actor.call("await_version", 0, commits=True)),
        ]
        await actor.call("committed")
        assert not any(wait.done() for wait in waits)
        await run.ref("coordinator").call("drain")
        for wait, what in zip(waits[:2], ("weights", "version 0"), strict=True):
            with pytest.raises(Stopping, match=f"^{what} must be there .* the run is being stopped"):
                await wait
        with pytest.raises(Stopping):  # who comes later, too
            await fwd.call("await_version", 0)
        await actor.call("commit", 0, 0, 7, [])
        assert await waits[2] == await fwd.call("await_version", 0) == {"version": 0}


async def test_grants_whose_answer_was_lost_are_granted_again_the_same() -> None:
    async with served(max_staleness=0) as run:
        rollout, *_ = await everyone(run)
        lost = (await rollout.call("lease", 8, []))["grants"]
        await run.restart()
        assert (await rollout.call("lease", 8, []))["grants"] == lost
        held = [[grant["group"], grant["epoch"]] for grant in lost[1:]]
        assert (await rollout.call("lease", 8, held))["grants"] == lost[:1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Making pages of large segments begins with the first event, and ends with the second."""
    begun, end, fallocate = threading.Event(), threading.Event(), os.posix_fallocate

    def made(fd: int, at: int, num_bytes: int) -> None:
        if num_bytes > QUICK_BYTES:
            begun.set()
            assert end.wait(300)
        fallocate(fd, at, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", made)
    yield begun, end
    end.set()


async def test_others_are_answered_while_a_large_ring_is_made_and_all_who_ask_for_it_get_the_same(slow) -> None:
    begun, end = slow
    async with served(max_staleness=0, ring_bytes=2 * QUICK_BYTES) as run:
        asking = [asyncio.create_task(run.bus("rollout-0")) for _ in range(2)]  # the second one's answer was lost
        await asyncio.to_thread(begun.wait, 60)
        actor = await asyncio.wait_for(run.bus("actor-0"), 30)
        await asyncio.wait_for(actor.call("commit", 0, 0, 7, []), 30)
        assert not any(task.done() for task in asking) and "ring/rollout-0/0" not in run.coordinator.index.space.rings
        end.set()
        for bus in [await task for task in asking]:
            await prove(bus)
        assert run.coordinator.index.space.rings["ring/rollout-0/0"].capacity > QUICK_BYTES
        (grant,) = (await bus.call("lease", 1, []))["grants"]
        put_group(bus, grant, [0, 1])
        await bus.call("renew", [])
        assert run.coordinator.index.counts["ready"] == 1


async def test_others_are_answered_while_a_large_overflow_ring_is_made(slow) -> None:
    begun, end = slow
    async with served(max_staleness=0, row_bytes=QUICK_BYTES) as run:
        rollout, *_, actor = await everyone(run)
        leasing = asyncio.create_task(rollout.call("lease", 1, []))  # two rows of 4 MiB do not fit the ring of 1 MiB
        await asyncio.to_thread(begun.wait, 60)
        await asyncio.wait_for(actor.call("committed"), 30)
        assert not leasing.done()
        end.set()
        (grant,) = (await leasing)["grants"]
        assert grant["ring"] == "overflow/rollout-0/0/0.0"
        put_group(rollout, grant, [0, 1])
        await rollout.call("renew", [])
        assert run.coordinator.index.counts["ready"] == 1


async def test_memory_that_cannot_be_had_is_told_to_who_asked_for_it_and_can_be_asked_for_again() -> None:
    async with served(max_staleness=0, ring_bytes=1 << 62) as run:
        for _ in range(2):
            with pytest.raises(OutOfSpace, match="ring/rollout-0/0 must fit into"):
                await run.bus("rollout-0")
        assert (await (await run.bus("actor-0")).call("committed"))["version"] is None


async def test_a_lease_that_is_late_in_both_ways_at_the_last_attempt_ends_once_and_the_coordinator_goes_on() -> None:
    async with served(max_staleness=0, max_infra_failures=0, straggler_deadline_s=100.0) as run:
        rollout, *_ = await everyone(run)
        await rollout.call("lease", 8, [])
        run.clock = 500.0
        run.coordinator.tick()
        counts = run.coordinator.index.counts
        assert (counts["failed"], counts["quarantined"], counts["running"]) == (3, 0, 0)
        assert (await rollout.call("lease", 8, []))["grants"]  # three others


async def test_prompt_groups_that_keep_failing_are_told_of_and_end_the_run_with_their_last_error() -> None:
    async with served(max_staleness=0, max_data_failures=0, max_consecutive_failed=17) as run:
        rollout, *_ = await everyone(run)
        reports: list[tuple[str, dict]] = []
        run.coordinator._report = lambda kind, data: reports.append((kind, data))

        async def fail(num: int) -> None:
            for _ in range(num):
                grant = (await rollout.call("lease", 1, []))["grants"][0]
                why = f"ZeroDivisionError in the reward of group {grant['group']}"
                await rollout.call("settle", grant["group"], grant["epoch"], "error", why)
                await rollout.call("abandon", grant["group"], grant["epoch"])
                run.coordinator.tick()

        grant = (await rollout.call("lease", 1, []))["grants"][0]
        put_group(rollout, grant, [0, 1])  # one that comes through
        await fail(7)
        assert run.coordinator.status()["failing"] == ""
        await fail(1)
        told = "8 prompt groups in a row have failed: ZeroDivisionError in the reward of group 8"
        assert run.coordinator.status()["failing"] == told
        await fail(10)
        assert [data["groups"] for kind, data in reports if kind == "failing"] == [8, 16]
        ((_, fatal),) = [report for report in reports if report[0] == "fatal"]
        assert fatal["cause"] == (
            "failed prompt groups in a row must be at most 17 (rollout.max_consecutive_failed), got 18. "
            "The last one failed so: ZeroDivisionError in the reward of group 18"
        )


@pytest.mark.parametrize("outcome", ["failed", "error"])
@pytest.mark.parametrize("has_scored", [False, True])
async def test_a_handful_of_failed_groups_ends_a_run_in_which_no_sample_ever_had_a_reward(
    outcome: str, has_scored: bool
) -> None:
    async with served(max_staleness=0, max_data_failures=0) as run:
        rollout, *_ = await everyone(run)
        reports: list[tuple[str, dict]] = []
        run.coordinator._report = lambda kind, data: reports.append((kind, data))
        for number in range(20 if has_scored else 5):
            assert "fatal" not in [kind for kind, _ in reports]
            grant = (await rollout.call("lease", 1, []))["grants"][0]
            told: list[Any] = [outcome, "got exit code 1. Its last words: No module named 'x'"]
            if outcome == "failed":
                told.append([None, 1.0 if has_scored and number == 3 else None])
            elif has_scored and number == 3:
                put_group(rollout, grant, [0])
            await rollout.call("settle", grant["group"], grant["epoch"], *told)
            await rollout.call("abandon", grant["group"], grant["epoch"])
            run.coordinator.tick()
        causes = [data["cause"] for kind, data in reports if kind == "fatal"]
    words = "got exit code 1. Its last words: No module named 'x'"
    cause = (
        f"a sample must have a reward, got none ever, and 5 prompt groups have failed. The last one failed so: {words}"
    )
    assert causes == ([] if has_scored else [cause])


async def plans_and_questions(run: Served, act: Callable[[], None], barrier: Callable[[], Any]) -> tuple[int, int]:
    """How many plans of train rounds an act leads to, and how many questions that wait are asked again."""
    counted = {"plans": 0, "questions": 0}
    plan, wake = run.coordinator.index.plan_rounds, run.coordinator._wakes._wake

    def planned(*args: Any, **more: Any) -> list[Any]:
        counted["plans"] += 1
        return plan(*args, **more)

    def woken(questions: dict[Any, None]) -> None:
        counted["questions"] += len(questions)
        wake(questions)

    run.coordinator.index.plan_rounds = planned
    run.coordinator._wakes._wake = woken
    act()
    await barrier()
    run.coordinator.index.plan_rounds, run.coordinator._wakes._wake = plan, wake
    return counted["plans"], counted["questions"]


async def test_a_put_asks_nobody_again_whom_it_cannot_help_and_one_plan_in_vain_is_for_all_ranks() -> None:
    whole = Stream("actor", ("tokens",), kind="train", whole_step=True)
    full = Stream("critic", ("tokens",), kind="train")
    async with served(max_staleness=0, streams=(whole, full), groups_per_step=4) as run:
        rollout, actor = await run.bus("rollout-0"), await run.bus("actor-0", num_ranks=8)
        for role in ("actor", "critic"):
            await actor.call("commit", 0, 0, 7, [], role)
        await prove(rollout)
        grants = (await rollout.call("lease", 4, []))["grants"]
        held = [[grant["group"], grant["epoch"]] for grant in grants]
        waits = [asyncio.create_task(rollout.call("lease", 4, held))]
        for stream, early in (("actor", False), ("critic", True)):
            await actor.call("join", stream, 8, 1 << 20)
            asking = [actor.call("next_rounds", stream, rank, 0, 0, early) for rank in range(8)]
            waits += map(asyncio.create_task, asking)

        async def barrier() -> None:
            await rollout.call("renew", [])

        await barrier()
        await actor.call("committed")
        assert len(run.coordinator._wakes) == 17
        found = await plans_and_questions(run, lambda: put_group(rollout, grants[0], [0]), barrier)
        assert found == (0, 0)
        # Its group is whole: its holder may get another one, and of one stream there may be a round; one plan, in vain.
        found = await plans_and_questions(run, lambda: put_group(rollout, grants[0], [1]), barrier)
        assert found == (1, 9)
        found = await plans_and_questions(run, lambda: put_group(rollout, grants[1], [0]), barrier)
        assert found == (0, 0) and not any(task.done() for task in waits)
        for grant, samples in ((grants[1], [1]), (grants[2], [0, 1]), (grants[3], [0, 1])):
            put_group(rollout, grant, samples)
        rounds = [(await task)["rounds"] for task in waits[1:]]
        assert [made[-1]["last"] for made in rounds] == [True] * 16
        waits[0].cancel()


async def test_a_wait_lasts_as_long_as_it_must_and_its_caller_asks_again_for_ever() -> None:
    async with served(max_staleness=0) as run:
        rollout, *_, actor = await everyone(run)
        refused = run.coordinator._wakes.send_back
        num_sent_back = 0

        def send_back() -> None:
            nonlocal num_sent_back
            num_sent_back += 1
            refused()

        run.coordinator._wakes.send_back = send_back
        waiting = asyncio.create_task(actor.call("await_version", 1))
        for _ in range(6):
            run.clock += HOLD_S + 1
            run.coordinator.tick()
            await rollout.call("renew", [])  # whoever was sent back has had his turn
            await actor.call("committed")
            assert not waiting.done()
        assert num_sent_back == 6
        assert len(run.coordinator._wakes) == 1
        run.coordinator.index.apply(
            {"event": "commit", "role": "actor", "version": 1, "checksum": 7, "attempt": 0, "spans": []}
        )
        run.coordinator._wakes.wake_all()
        assert await waiting == {"version": 1}


async def test_a_checkpoint_takes_an_index_of_any_size() -> None:
    num_rows, text = strength(quick=8_000, full=200_000), strength(quick=20_000, full=10)
    async with served(max_staleness=0, groups_per_step=num_rows // 8, samples_per_group=8) as run:
        *_, actor = await everyone(run)
        index, name = run.coordinator.index, "ring/rollout-0/0"
        for event in index.plan_admissions(0):
            index.apply(event)
        for at in range(num_rows):
            group, sample = divmod(at, 8)
            if not sample:
                index.apply(
                    {"event": "grant", "group": group, "epoch": 0, "member": "rollout-0", "ring": name, "entries": [64]}
                )
            index.apply({
                "event": "put", "ring": name, "pos": at * 64, "seq": at + 1, "bytes": 64, "spans": [[group, 0, sample, 1]],
                "columns": ["tokens", "loss_mask"], "epoch": 0, "attempt": 0, "reservation": "", "entries": 1,
                "info": [[9], [4], [1.0], [0], [0]],
            })  # fmt: skip
            index.groups[group].error = "x" * text  # the traceback of a reward
        state = (await actor.call("checkpoint", 0))["state"]
        assert len(state) > MAX_HEADER_BYTES
        assert len(Index.load(run.config.rules, orjson.loads(state)).groups) == num_rows // 8


async def test_a_checkpoint_is_given_also_where_the_journal_has_no_room_to_begin_a_new_file() -> None:
    async with served(max_staleness=0) as run:
        *_, actor = await everyone(run)
        path = run._journal.path
        path.with_name(f"{int(path.stem) + 1:08d}.tmp").mkdir()  # where the next file is written first
        answer = await actor.call("checkpoint", run.coordinator.index.version)
        assert orjson.loads(answer["state"])["version"] == run.coordinator.index.version
        assert run._journal.path == path
        path.with_name(f"{int(path.stem) + 1:08d}.tmp").rmdir()


async def test_nobody_hears_that_something_is_done_before_it_is_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(events: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with served(max_staleness=0) as run:
        await everyone(run)
        calls = [
            lambda: run.coordinator.proved("rollout-0", 1, "rollout.0", 0),
            lambda: run.coordinator.join("actor-0", 1, "actor", 3, 128),
            lambda: run.coordinator.evaluated("rollout-0", 1, "end", {"version": 0}),
        ]
        for call in calls:
            with monkeypatch.context() as disk:
                disk.setattr(run._journal, "append", full)
                with pytest.raises(NotYet, match="the disk is full"):
                    await call()
                run.coordinator.tick()
            run.coordinator.tick()
            await call()
            run.coordinator._pending.check()
