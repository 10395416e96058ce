"""Media of prompt groups on the bus: once a group, seen by those who read them, gone with the group."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rondo.comm.bus.audit import audit
from rondo.comm.bus.bus import Bus, Round
from rondo.comm.ring.records import Column, worst_case_bytes
from rondo.comm.ring.ring import RecordRef, ring_bytes
from rondo.runtime.errors import CorruptData
from tests.comm.served import PROMPT, RESPONSE, ROW_BYTES, Served, prove, put_group, score, served

PATCHES = 64
MEDIA_BYTES = worst_case_bytes(1, [("pixel_values", 4, PATCHES * 8), ("image_grid_thw", 8, 3)])
ENCODER = 11


def put_media(bus: Bus, grant: dict[str, Any], value: float | None = None) -> RecordRef:
    """One picture of 64 patches; every value is the group's number, unless another is given."""
    pixels = np.full((PATCHES, 8), grant["group"] if value is None else value, np.float32)
    columns = [
        Column("pixel_values", "float32", [pixels]),
        Column("image_grid_thw", "int64", [np.array([[1, 8, 8]], np.int64)]),
    ]
    return bus.put_media(grant["ring"], grant["group"], grant["epoch"], columns, ENCODER)


async def everyone(run: Served) -> list[Bus]:
    buses = [await run.bus(name) for name in ("rollout-0", "actor_fwd-0", "advantages-0", "actor-0")]
    await buses[3].call("commit", 0, 0, 7, [])
    await prove(buses[0])
    return buses


async def leases(bus: Bus) -> list[dict[str, Any]]:
    return (await bus.call("lease", 8, []))["grants"]


async def finish(fwd: Bus, advantages: Bus, actor: Bus) -> None:
    """Score and train step 0; every row has the picture of its group."""
    await asyncio.gather(score(fwd, "actor_fwd", "log_probs", 1), score(advantages, "advantages", "advantages", 1))
    ids = []
    async for made in actor.stream("actor", tokens=1 << 20, step=0):
        for row in made.rows:
            assert row.media is not None and {float(row.group)} == set(row.media["pixel_values"].flat)
        actor.check(made)
        ids += made.spans
    await actor.call("commit", 0, 1, 7, ids)


def rings(run: Served) -> list[tuple[int, int]]:
    return [(ring["used"], ring["reserved"]) for ring in run.coordinator.status()["rings"].values()]


async def one_round(bus: Bus, stream: str) -> Round:
    async for made in bus.stream(stream, tokens=1 << 20):
        return made
    raise AssertionError("the stream ended")


async def test_the_media_of_a_group_cross_the_bus_once_and_its_samples_share_one_view() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        grants = await leases(rollout)
        sizes = [put_media(rollout, grant).num_bytes for grant in grants]
        for grant in grants:
            put_group(rollout, grant, [0, 1])
        made = await one_round(fwd, "actor_fwd")
        assert [(row.group, row.sample) for row in made.rows] == [(g, s) for g in range(3) for s in range(2)]
        for first, second in zip(made.rows[::2], made.rows[1::2], strict=True):
            assert first.media is not None and first.media is second.media and first.media_key == second.media_key
            pixels, grid = first.media["pixel_values"], first.media["image_grid_thw"]
            assert pixels.shape == (PATCHES, 8) and set(pixels.flat) == {float(first.group)}
            assert grid.tolist() == [[1, 8, 8]] and grid.dtype == np.int64
            assert not pixels.flags.writeable and not pixels.flags.owndata
        assert len({row.media_key for row in made.rows}) == 3
        status = run.coordinator.status()
        assert status["media_bytes"] == sum(sizes) and 0 < status["row_bytes"] < sum(sizes)
        await finish(fwd, advantages, actor)
        assert set(rings(run)) == {(0, 0)}


async def test_a_round_names_the_media_of_a_group_once_and_only_where_they_are_read() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, advantages, _ = await everyone(run)
        first, second, third = await leases(rollout)
        for grant in (first, third):
            put_media(rollout, grant)
        for grant in (first, second, third):
            put_group(rollout, grant, [0, 1])
        await fwd.join("actor_fwd", 1 << 20)
        await advantages.join("advantages", 1 << 20)
        named = (await fwd.call("next_rounds", "actor_fwd", 0, 0))["rounds"][0]["groups"]
        assert [group["group"] for group in named if group["media"]] == [first["group"], third["group"]]
        assert all(group["media"].keys() <= {"pixel_values", "image_grid_thw"} for group in named)
        unread = (await advantages.call("next_rounds", "advantages", 0, 0))["rounds"][0]["groups"]
        assert [group["media"] for group in unread] == [{}, {}, {}]
        made = await one_round(fwd, "actor_fwd")
        assert [row.media is None for row in made.rows] == [False, False, True, True, False, False]
        assert all(row.media is None for row in (await one_round(advantages, "advantages")).rows)


async def test_media_of_a_replica_that_died_before_its_samples_serve_those_of_the_next() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        other = await run.bus("rollout-1")
        first, second, third = await leases(rollout)
        await prove(other)
        put_media(rollout, first)
        put_media(rollout, second)
        put_group(rollout, second, [1])
        await run.die("rollout-0")
        again = await leases(other)
        assert [(grant["group"], [sample for sample, *_ in grant["have"]]) for grant in again] == [
            (first["group"], []), (second["group"], [1]), (third["group"], []),
        ]  # fmt: skip
        for grant, samples in zip(again, ([0, 1], [0], [0, 1]), strict=True):
            assert grant["has_media"] == (grant["group"] != third["group"])
            if not grant["has_media"]:
                put_media(other, grant)
            put_group(other, grant, samples)
        await finish(fwd, advantages, actor)
        assert run.coordinator.index.refused_rows == 0
        assert set(rings(run)) == {(0, 0)}
        found = audit(run.folder / "journal", 2, 3)
        assert (found.num_put, found.num_trained, found.num_lost, found.num_unexpected) == (6, 6, 0, 0)


async def test_the_first_media_of_a_group_count_whoever_puts_others() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        for grant in await leases(rollout):
            put_media(rollout, grant)
            put_media(rollout, grant, value=-1.0)
            put_group(rollout, grant, [0, 1])
        await finish(fwd, advantages, actor)  # nobody sees a -1
        assert run.coordinator.index.refused_rows == 3
        assert set(rings(run)) == {(0, 0)}


async def test_media_of_a_lost_lease_are_refused_and_their_memory_returns() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, *_ = await everyone(run)
        grants = await leases(rollout)
        run.clock = 150.0
        run.coordinator.tick()
        put_media(rollout, grants[0])
        await rollout.call("renew", [])
        assert run.coordinator.index.groups[grants[0]["group"]].media == {}
        assert run.coordinator.index.refused_rows == 1
        for grant in grants:
            await rollout.call("abandon", grant["group"], grant["epoch"])
        assert set(rings(run)) == {(0, 0)}


async def test_media_outlive_the_coordinator_whenever_it_dies() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        grants = await leases(rollout)
        for grant in grants:
            put_media(rollout, grant)
        await run.restart()  # media that nobody had read yet are found in the ring
        assert all(run.coordinator.index.groups[grant["group"]].encoder == ENCODER for grant in grants)
        for grant in grants:
            put_group(rollout, grant, [0, 1])
        made = await one_round(fwd, "actor_fwd")
        before = run.coordinator.index.dump()
        await run.restart()
        assert run.coordinator.index.dump() == before
        assert (await one_round(fwd, "actor_fwd")).spans == made.spans
        await finish(fwd, advantages, actor)
        await run.restart()
        assert set(rings(run)) == {(0, 0)} and run.coordinator.index.version == 1


@pytest.mark.parametrize("outcome", ["filtered", "quarantined", "surplus"])
async def test_a_group_that_ends_untrained_frees_its_media(outcome: str) -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES, max_data_failures=0, spare_groups=1) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        *rest, late = await leases(rollout)
        put_media(rollout, late)
        for grant in rest:
            put_media(rollout, grant)
            put_group(rollout, grant, [0, 1])
        if outcome != "surplus":
            act = "filtered" if outcome == "filtered" else "error"
            await rollout.call("settle", late["group"], 0, act, "equal rewards")
        await finish(fwd, advantages, actor)
        await rollout.call("abandon", late["group"], 0)
        assert run.coordinator.index.counts[outcome] == 1
        assert set(rings(run)) == {(0, 0)}


async def test_media_without_room_in_the_ring_go_through_an_overflow_ring_for_the_oldest_step() -> None:
    one_group = ring_bytes(MEDIA_BYTES + 2 * ROW_BYTES)
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES, ring_bytes=one_group) as run:
        rollout, fwd, advantages, actor = await everyone(run)
        grants = await leases(rollout)
        assert sorted(grant["ring"].split("/")[0] for grant in grants) == ["overflow", "overflow", "ring"]
        for grant in grants:
            put_media(rollout, grant)
            put_group(rollout, grant, [0, 1])
        await finish(fwd, advantages, actor)
        assert set(rings(run)) == {(0, 0)}
        assert not [name for name, _ in run.segments.stats().segments if name.startswith("overflow/")]


async def test_an_overflow_ring_holds_the_largest_group_it_was_made_for() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES, ring_bytes=1 << 13) as run:
        rollout, *_ = await everyone(run)
        grant, *_ = await leases(rollout)
        size = put_media(rollout, grant).num_bytes
        put_group(rollout, grant, [0])
        put_group(rollout, grant, [1])
        await rollout.call("renew", [])
        space = run.coordinator.index.space.rings[grant["ring"]]
        assert grant["ring"].startswith("overflow/") and size <= MEDIA_BYTES
        assert sum(run.coordinator.index.entries(run.coordinator.index.groups[grant["group"]])) <= space.capacity
        assert run.coordinator.index.groups[grant["group"]].state == "ready"


async def test_media_that_were_overwritten_while_they_were_read_are_found_out() -> None:
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, *_ = await everyone(run)
        grants = await leases(rollout)
        refs = [put_media(rollout, grant) for grant in grants]
        for grant in grants:
            put_group(rollout, grant, [0, 1])
        made = await one_round(fwd, "actor_fwd")
        fwd.check(made)
        run.coordinator._rings.release(refs[0].ring, refs[0].pos + refs[0].num_bytes)  # a release too early
        with pytest.raises(CorruptData, match=f"record {refs[0].seq} at 0 of ring/rollout-0/0 must stay"):
            fwd.check(made)


async def test_samples_of_a_group_with_media_stay_together_in_rounds_of_streams_that_read_them() -> None:
    # Two samples cost 2 * (10 + 6) = 32 with their share of 11 encoder positions: a micro-batch of 40 holds one group.
    async with served(max_staleness=0, media_bytes=MEDIA_BYTES) as run:
        rollout, fwd, *_ = await everyone(run)
        for grant in await leases(rollout):
            put_media(rollout, grant)
            put_group(rollout, grant, [0, 1])
        assert PROMPT + RESPONSE == 10
        rows = []
        async for made in fwd.stream("actor_fwd", tokens=40):
            fwd.put_columns(made, {"log_probs": [np.zeros(row.response, np.float32) for row in made.rows]})
            await fwd.ack(made)
            rows.append(made.spans)
            if len(rows) == 3:
                break
        assert rows == [[[group, 0, 0, 2]] for group in range(3)]
