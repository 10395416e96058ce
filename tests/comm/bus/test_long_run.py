"""A coordinator that works for long, on a disk that fills up, or after a power failure: real journal, real rings, one process."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

import rondo.comm.bus.journal
from rondo.comm.bus.audit import audit
from rondo.comm.bus.bus import Bus
from rondo.comm.bus.journal import files, read
from rondo.comm.bus.rounds import Stream
from rondo.runtime.errors import CorruptData
from tests.comm.inprocess import InProcess, Store, put
from tests.strength import strength

GROWTH_BYTES = 2 << 20
"""Of resident memory, in half of the run: what the allocator has around it."""
PLAIN = (Stream("actor", ("tokens",), kind="train"),)


async def step(
    rollout, actor, number: int, groups: int, commit: Callable[[list], Awaitable[None]] | None = None
) -> None:
    await rollout.call("proved", "rollout.0", number)
    grants = (await rollout.call("lease", groups, []))["grants"]
    for grant in grants:
        put(rollout, grant, [0, 1], version=number)
    await rollout.call("renew", [])
    spans = []
    async for made in actor.stream("actor", tokens=1 << 20, step=number):
        spans += made.spans
    if commit is not None:
        await commit(spans)
    else:
        assert (await actor.call("commit", actor.member.attempt, number + 1, 7, spans))["version"] == number + 1


@asynccontextmanager
async def training(folder: Path, **changes: Any) -> AsyncIterator[tuple[InProcess, Bus, Bus]]:
    """A run with version 0, and the buses of a rollout and of the actor. It is stopped by who has it."""
    store = Store()
    run = InProcess(folder, store, **{"groups_per_step": 2, "max_staleness": 0, "streams": PLAIN, **changes})
    await run.start()
    rollout, actor = await run.bus("rollout-0"), await run.bus("actor-0")
    await actor.call("commit", 0, 0, 7, [])
    yield run, rollout, actor
    rollout.close()
    actor.close()
    store.close()


async def save(folder: Path, actor, version: int) -> None:
    """A checkpoint, of which the coordinator needs no more than the index."""
    whole = folder / "checkpoints" / f"step_{version:06d}"
    whole.mkdir(parents=True)
    state = (await actor.call("checkpoint", version))["state"]
    (whole / "index.json").write_bytes(b'{"version":%d,"index":%s}' % (version, state))
    (whole / "COMPLETE").write_text("{}\n")


async def test_steps_without_end_keep_memory_descriptors_files_and_replay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = strength(quick=1_000, full=100_000)
    monkeypatch.setattr(rondo.comm.bus.journal, "ROTATE_BYTES", 1 << 17)
    async with training(tmp_path, num_steps=num_steps) as (run, rollout, actor):
        telling = asyncio.create_task(run.coordinator.reporting())
        me, seen = psutil.Process(), []
        for number in range(num_steps):
            await step(rollout, actor, number, 2)
            await asyncio.sleep(0)  # reports go out
            if (number + 1) % (num_steps // 4) == 0:
                state = len(orjson.dumps(run.coordinator._state()))  # of index and ledger
                held = len(run.coordinator._renewed) + len(run.coordinator._granted) + len(run.coordinator._put_at)
                journal = sum(path.stat().st_size for path in (tmp_path / "journal").iterdir())
                replayed = sum(1 for _ in run.journal.replay())
                seen.append((state, held, me.num_fds(), replayed, journal, me.memory_info().rss))
        for (state, held, fds, replayed, journal, _), (state_0, _, fds_0, *_) in zip(seen[1:], seen, strict=False):
            assert state < state_0 + 128 and held <= 12 and fds <= fds_0 and replayed < 2_000
            # Two files, each a snapshot, events up to the limit and the last write.
            assert journal < 2 * ((1 << 17) + state + 1024)
        assert seen[3][-1] - seen[1][-1] < GROWTH_BYTES, seen
        assert int(run.journal.path.stem) > num_steps // 500  # so often was it rotated
        telling.cancel()
        await run.stop()
        await run.start()
        assert run.coordinator.index.version == num_steps
        found = audit(tmp_path / "journal", 2, 2)
        assert (found.num_trained, found.num_lost, found.num_trained_twice) == (4 * num_steps, 0, 0)
        await run.stop()


async def test_samples_that_come_when_their_step_is_over_leave_nothing_behind(tmp_path: Path) -> None:
    async with training(tmp_path, spare_groups=1) as (run, rollout, actor):
        await rollout.call("proved", "rollout.0", 0)
        late, *others = (await rollout.call("lease", 3, []))["grants"]
        await rollout.call("settle", late["group"], late["epoch"], "failed", "it takes too long")
        for grant in others:
            put(rollout, grant, [0, 1])
        await rollout.call("renew", [])
        spans = []
        async for made in actor.stream("actor", tokens=1 << 20, step=0):
            spans += made.spans
        await actor.call("commit", 0, 1, 7, spans)
        put(rollout, late, [0, 1])
        await rollout.call("renew", [])
        held = run.coordinator._put_at, run.coordinator._renewed, run.coordinator._granted
        assert run.coordinator.index.refused_rows == 2 and held == ({}, {}, {})
        await run.stop()


class Counted(dict[Any, Any]):
    """How many of its entries were looked at, or gone through."""

    touched = 0

    def __getitem__(self, key: Any) -> Any:
        Counted.touched += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        Counted.touched += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        Counted.touched += len(self)
        return super().__iter__()

    def keys(self) -> Any:
        Counted.touched += len(self)
        return super().keys()

    def values(self) -> Any:
        Counted.touched += len(self)
        return super().values()

    def items(self) -> Any:
        Counted.touched += len(self)
        return super().items()


async def touched_by_a_step(folder: Path, num_held: int) -> int:
    """Prompt groups that are looked at by a step's lease, put, rounds and commit, and by a status, while so many steps wait."""
    async with training(folder, num_steps=1_000, max_staleness=1_000, ring_bytes=1 << 20) as (run, rollout, actor):
        for number in range(num_held):
            await rollout.call("proved", "rollout.0", 0)
            for grant in (await rollout.call("lease", 2, []))["grants"]:
                put(rollout, grant, [0, 1])
            await rollout.call("renew", [])
            assert run.coordinator.index.counts["ready"] == 2 * number + 2
        coordinator = run.coordinator
        coordinator._audit()
        for owner, name in (
            (coordinator.index, "groups"), (coordinator.index, "steps"), (coordinator.ledger, "open"),
            (coordinator.ledger, "steps"), (coordinator, "_put_at"), (coordinator, "_renewed"), (coordinator, "_granted"),
        ):  # fmt: skip
            setattr(owner, name, Counted(getattr(owner, name)))
        Counted.touched = 0
        await step(rollout, actor, 0, 2)
        coordinator._audit()
        coordinator.status()
        touched = Counted.touched
        await run.stop()
        return touched


async def test_a_step_and_a_status_look_at_no_more_prompt_groups_the_more_are_held(tmp_path: Path) -> None:
    assert await touched_by_a_step(tmp_path / "few", 2) == await touched_by_a_step(tmp_path / "many", 40)


async def commit(run: InProcess, version: int, spans: list[list[int]]) -> None:
    """What the coordinator refuses, since it would be a fault."""
    event = {"event": "commit", "role": "actor", "member": "actor-0", "version": version, "checksum": 7, "attempt": 0}
    run.coordinator._emit({**event, "spans": spans})


@pytest.mark.parametrize("rotated", ["before", "after"])
@pytest.mark.parametrize("fault", ["lost", "trained_twice"])
async def test_a_loss_and_a_duplicate_show_on_both_sides_of_a_rotation(
    tmp_path: Path, fault: str, rotated: str
) -> None:
    async with training(tmp_path) as (run, rollout, actor):
        await step(rollout, actor, 0, 2)
        if rotated == "before":
            await actor.call("checkpoint", 1)
        if fault == "lost":
            await step(rollout, actor, 1, 2, commit=lambda spans: commit(run, 2, spans[1:]))
        else:  # a sample of the step that is behind, by a commit that the index passes over
            await commit(run, 1, [[1, 0, 1, 1]])
            await step(rollout, actor, 1, 2)
        found = audit(tmp_path / "journal", 2, 2)
        assert (found.num_lost, found.num_trained_twice) == ((2, 0) if fault == "lost" else (0, 1))
        await actor.call("checkpoint", 2)
        assert len(files(tmp_path / "journal")) == 2
        await step(rollout, actor, 2, 2)
        await run.stop()
        await run.start()
        assert audit(tmp_path / "journal", 2, 2) == run.coordinator.ledger.totals()
        after = audit(tmp_path / "journal", 2, 2)
        assert (after.num_lost, after.num_trained_twice) == (found.num_lost, found.num_trained_twice)
        assert (after.num_admitted, after.num_trained) == (12, 10 if fault == "lost" else 12)
        await run.stop()


async def test_what_a_checkpoint_does_not_know_counts_no_more_but_what_was_lost(tmp_path: Path) -> None:
    async with training(tmp_path) as (run, rollout, actor):
        await step(rollout, actor, 0, 2)
        await save(tmp_path, actor, 1)
        await step(rollout, actor, 1, 2)
        await actor.call("checkpoint", 2)  # which was not written: the journal alone goes on from there
        await commit(run, 1, [[1, 0, 1, 1]])
        await step(rollout, actor, 2, 2, commit=lambda spans: commit(run, 3, spans[1:]))
        found = audit(tmp_path / "journal", 2, 2)
        assert (found.num_trained, found.num_lost, found.num_trained_twice) == (10, 2, 1)
        await run.stop()
        run.attempt = 1
        await run.start()
        found = audit(tmp_path / "journal", 2, 2)
        assert (found.num_admitted, found.num_trained, found.num_lost, found.num_trained_twice) == (4, 4, 2, 0)
        rollout, actor = await run.bus("rollout-0", 2), await run.bus("actor-0", 2)
        await step(rollout, actor, 1, 2)  # again, with groups of the same numbers
        found = audit(tmp_path / "journal", 2, 2)
        assert (found.num_admitted, found.num_trained, found.num_lost, found.num_trained_twice) == (8, 8, 2, 0)
        await run.stop()


async def test_a_coordinator_waits_for_room_on_the_disk_tells_and_goes_on_with_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rondo.comm.bus.journal, "RESERVE_BYTES", 1 << 13)
    monkeypatch.setattr(rondo.comm.bus.journal, "_LOW_BYTES", 1 << 12)
    monkeypatch.setattr("rondo.comm.bus.pending.ROOM_S", 0.001)
    async with training(tmp_path) as (run, rollout, actor):
        reports: list[str] = []
        full = asyncio.Event()

        def report(kind: str, data: dict[str, Any]) -> None:
            reports.append(kind)
            if kind == "journal_waits":
                full.set()

        run.coordinator._report = report
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.journal.path.stat().st_size, limits[1]))
        try:
            steps = asyncio.create_task(steps_to_the_end(rollout, actor))
            await full.wait()
            for _ in range(3):
                run.clock += 1000.0  # far beyond any lease
                run.coordinator.tick()
                await asyncio.sleep(0.005)
            assert not steps.done() and run.coordinator.status()["attempt"] == 0  # it answers those who look
            assert all(list(read(path)) for path in files(tmp_path / "journal"))  # whole lines
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        run.coordinator.tick()
        async with asyncio.timeout(60):
            await steps
        # Told once a minute: nothing hangs.
        assert (reports.count("journal_waits"), reports.count("journal_goes_on")) == (4, 1)
        await run.stop()
        found = audit(tmp_path / "journal", 2, 2)
        assert (found.num_trained, found.num_lost, found.num_trained_twice, found.num_leases_lost) == (16, 0, 0, 0)


async def steps_to_the_end(rollout, actor) -> None:
    for number in range(4):
        await step(rollout, actor, number, 2)


@pytest.mark.parametrize("saved", [True, False])
async def test_a_hole_in_the_journal_does_not_stand_before_a_whole_checkpoint(tmp_path: Path, saved: bool) -> None:
    async with training(tmp_path) as (run, rollout, actor):
        await step(rollout, actor, 0, 2)
        if saved:
            await save(tmp_path, actor, 1)
        await step(rollout, actor, 1, 2)
        await run.stop()
        path = files(tmp_path / "journal")[-1]
        size = path.stat().st_size
        with path.open("r+b") as file:  # pages that the power failure kept from the disk, before ones that it did not
            file.seek(size // 2)
            file.write(bytes(300))
        run.attempt = 1
        if not saved:
            with pytest.raises(CorruptData, match="`rondo resume` goes on from a checkpoint; without one, train anew"):
                await run.start()
        else:
            await run.start()
            assert (run.coordinator.index.version, run.coordinator.index.attempt) == (1, 1)
            assert path.with_suffix(".broken").stat().st_size == size  # for who wants to look
            found = audit(tmp_path / "journal", 2, 2)
            assert (found.num_trained, found.num_lost) == (4, 0)
            await run.stop()
