from __future__ import annotations

import asyncio
import errno
import threading
from contextlib import contextmanager

import numpy as np
import orjson
import pytest
import torch
from torch.utils.data import DataLoader

from rondo.comm.bus.member import Member
from rondo.comm.partitions.checkpoint import restore, save
from rondo.comm.partitions.client import Partitions
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.loader import StreamingLoader
from rondo.comm.partitions.runs import expand
from rondo.comm.partitions.spec import (
    Balanced,
    Groups,
    Ordered,
    Own,
    Sequential,
    TokenBudget,
    VersionWindow,
)
from rondo.comm.partitions.sync import SyncPartition
from rondo.comm.partitions.task import CLAIMED
from rondo.runtime.errors import ConfigError, CorruptData, DeadlineExceeded, SamplerFailed
from tests.comm.partitions.world import served


async def two(run, **settings):
    """One partition in two processes' hands."""
    return [(await run.bus(group)).partition("p", **settings) for group in ("rollout-0", "actor-0")]


# ---- threads and torch ----------------------------------------------------------------------------------------------


async def test_a_thread_puts_reads_and_waits_with_blocking_calls():
    async with served() as run:
        writer, reader = (SyncPartition(part) for part in await two(run))

        def work() -> list[int]:
            writer.put({"x": torch.arange(5)}, keys=list("abcde"), tags={"of": "thread"})
            writer.end()
            found = []
            for batch in reader.stream("t", columns=["x"], batch=2):
                found += [int(x) for x in batch["x"]]
                batch.ack()
            with pytest.raises(DeadlineExceeded):
                reader.get(["nobody"], wait=True, deadline_s=0.01)
            assert int(reader.get(["c"])["x"][0]) == 2
            assert [row["key"] for row in reader.list(tags={"of": "thread"})[0]] == list("abcde")
            assert reader.clear(["a"]) == 1 and reader.stats().num_rows == 4
            writer.drop()
            return found

        assert await asyncio.to_thread(work) == [0, 1, 2, 3, 4]
        with pytest.raises(RuntimeError, match="another thread"):
            writer.end()


async def test_a_loader_reads_every_pass_on_every_rank_and_ends():
    async with served() as run:
        writer, reader = await two(run)
        await writer.put({"x": torch.arange(10, dtype=torch.bfloat16), "name": [f"r{i}" for i in range(10)]})
        await writer.end()
        sync = SyncPartition(reader)
        both = threading.Barrier(2)

        def rank(number: int) -> list[list[float]]:
            loader = StreamingLoader(sync, "t", ["x", "name"], batch=2, rank=number, ranks=2, passes=3, prefetch=1)
            both.wait(120)
            seen = []
            for columns in DataLoader(loader, batch_size=None):
                assert columns["name"] == [f"r{int(x)}" for x in columns["x"]]
                assert all(x.dtype == torch.bfloat16 for x in columns["x"])
                seen.append([float(x) for x in columns["x"]])
            return seen

        found = await asyncio.gather(asyncio.to_thread(rank, 0), asyncio.to_thread(rank, 1))
        assert len(found[0]) == len(found[1])
        values = sorted(x for batches in found for batch in batches for x in batch)
        assert values == sorted([*map(float, range(10))] * 3)


async def test_a_loader_refuses_to_be_split_over_worker_processes(monkeypatch):
    async with served() as run:
        _, reader = await two(run)
        monkeypatch.setattr("rondo.comm.partitions.loader.get_worker_info", object)  # as inside a DataLoader's worker
        with pytest.raises(ConfigError, match="num_workers=0"):
            next(iter(StreamingLoader(SyncPartition(reader), "t", ["x"])))
        with pytest.raises(ConfigError, match="prefetch"):
            StreamingLoader(SyncPartition(reader), "t", ["x"], prefetch=0)


async def test_a_loader_that_is_left_goes_on_with_what_was_not_acknowledged_and_can_be_reset():
    async with served() as run:
        writer, reader = await two(run)
        await writer.put({"x": np.arange(6)})
        await writer.end()

        def work() -> None:
            loader = StreamingLoader(SyncPartition(reader, loop), "t", ["x"], batch=2, prefetch=1)
            first = next(iter(loader))["x"]
            rest = [int(x) for columns in loader for x in columns["x"]]
            assert sorted({int(x) for x in first} | set(rest)) == list(range(6))
            assert list(loader) == []
            loader.reset()
            assert [int(x) for columns in loader for x in columns["x"]] == list(range(6))

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(work)


# ---- samplers through the bus ---------------------------------------------------------------------------------------


ALL_SAMPLERS = [
    Sequential(), Groups(2), Balanced(), Balanced(equal_size=False), TokenBudget(40), VersionWindow(),
    VersionWindow(min_version=0, max_version=9), Ordered(seed=3), Ordered(seed=3, window=4),
    Own("tests.comm.partitions.own_samplers:Shuffled", {"seed": 1}),
]  # fmt: skip


@pytest.mark.parametrize("sampler", ALL_SAMPLERS, ids=str)
async def test_every_sampler_delivers_each_row_once_to_one_rank_and_to_all_its_peers(sampler):
    async with served() as run:
        run.roster.alive["actor-0"] = 1
        await run.ref().call("member_started", "actor-0", 1, 4)
        processes = [Partitions(Member("actor-0", 1, rank, 4, 0), run.ref(), run.client()) for rank in range(4)]
        run.buses += processes
        writer = (await run.bus("rollout-0")).partition("p")
        for first in range(0, 24, 6):
            numbers = range(first, first + 6)
            await writer.put(
                {"tokens": [np.full(1 + number % 7, number, np.int32) for number in numbers]}, keys=list(map(str, numbers)),
                groups=[number // 2 for number in numbers], policy_versions=[number % 5 for number in numbers],
            )  # fmt: skip
        await writer.end()

        async def read(bus: Partitions) -> list[list[int]]:
            found = []
            async for batch in bus.partition("p").stream("t", columns=["tokens"], sampler=sampler, batch=4, ranks=2):
                found.append([int(row[0]) for row in batch["tokens"]])
                batch.ack()
            return found

        found = await asyncio.gather(*map(read, processes))
        assert found[0] == found[2] and found[1] == found[3], "processes 0 and 2 are peers, and so are 1 and 3"
        assert len(found[0]) == len(found[1])
        assert sorted(number for batches in found[:2] for batch in batches for number in batch) == list(range(24))
        assert writer.stats().tasks["t"].num_done == 24


async def test_a_users_sampler_that_fails_is_an_error_of_its_caller_and_of_nobody_else():
    async with served() as run:
        part, _ = await two(run)
        await part.put({"x": np.arange(4)})
        sampler = Own("tests.comm.partitions.own_samplers:Wrong", {"how": "raise"})
        with pytest.raises(SamplerFailed, match="ZeroDivisionError: oops"):
            await part.stream("bad", columns=["x"], sampler=sampler).next()
        assert len(await part.stream("good", columns=["x"], batch=4).next()) == 4


async def test_a_stream_of_whole_groups_ends_and_leaves_broken_groups_counted():
    async with served() as run:
        part, _ = await two(run)
        await part.put({"x": np.arange(5)}, groups=["a", "b", "a", "b", "c"])
        await part.end()
        batches = []
        async for batch in part.stream("t", columns=["x"], sampler=Groups(2), batch=2):
            batches.append((batch.groups, [int(x) for x in batch["x"]]))
            batch.ack()
        assert batches == [(["a", "a"], [0, 2]), (["b", "b"], [1, 3])]
        assert part.stats().tasks["t"].num_ready == 1


# ---- disk -----------------------------------------------------------------------------------------------------------


async def test_a_partition_is_restored_into_other_rings_with_everything_that_was_known(tmp_path):
    async with served() as run:
        part, other = await two(run, capacity_bytes=1 << 20)
        bf16 = torch.arange(12, dtype=torch.bfloat16).reshape(6, 2)
        await part.put(
            {"x": bf16, "name": [{"n": i} for i in range(6)]}, keys=[f"k{i}" for i in range(6)], groups=list("aabbcc"),
            tags=[{"i": i} for i in range(6)], policy_versions=[3] * 6,
        )  # fmt: skip
        await part.put({"x": bf16[:3] + 100})
        await part.add(["k1", "k2"], {"y": np.array([1.5, 2.5])})
        batch = await part.stream("t", columns=["x"], batch=4).next()
        batch.ack()
        assert await save(part, tmp_path / "saved", rows_a_record=2) == 9
        await part.drop()
        again = [
            (await run.bus(g)).partition("q", capacity_bytes=1 << 17, chunk_bytes=1 << 16)
            for g in ("rollout-1", "actor_fwd-0")
        ]
        counts = [await restore(part, tmp_path / "saved", rank=rank, ranks=2) for rank, part in enumerate(again)]
        assert sum(counts) == 9 and min(counts) > 0
        found = await again[0].get([f"k{i}" for i in range(6)], ["x", "name"])
        assert torch.equal(torch.stack(found.tensors("x")), bf16)
        assert found["name"] == [{"n": i} for i in range(6)] and found.groups == list("aabbcc")
        assert found.tags == [{"i": i} for i in range(6)] and found.versions == [3] * 6
        assert [float(y) for y in (await again[0].get(["k1", "k2"], ["y"]))["y"]] == [1.5, 2.5]
        await again[0].end()
        rest = []
        async for batch in again[1].stream("t", columns=["x"], batch=64):
            rest += [float(x[0]) for x in batch.tensors("x")]
            batch.ack()
        assert sorted(rest) == [8.0, 10.0, 100.0, 102.0, 104.0]
        await other.drop()


async def test_a_column_of_some_rows_survives_a_restore_whatever_was_changed_last(tmp_path):
    async with served() as run:
        part, _ = await two(run)
        await part.put({"x": np.arange(4)}, keys=list("abcd"))
        await part.add(["b", "c"], {"y": np.array([1, 2])})
        await part.tag(list("abcd"), {"seen": True})
        await save(part, tmp_path)
        again = (await run.bus("rollout-1")).partition("q")
        assert await restore(again, tmp_path) == 4
        assert [int(y) for y in (await again.get(["b", "c"], ["y"]))["y"]] == [1, 2]
        assert (await again.get(["a"])).columns == ["x"]


async def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    async with served() as run:
        part, _ = await two(run)
        await part.put({"x": np.arange(64)})
        await save(part, tmp_path)
        data = bytearray((tmp_path / "rows.bin").read_bytes())
        data[-64] ^= 1
        (tmp_path / "rows.bin").write_bytes(data)
        with pytest.raises(CorruptData, match="checksum"):
            await restore((await run.bus("rollout-1")).partition("q"), tmp_path)
        (tmp_path / "rows.bin").write_bytes(data[:-1])
        with pytest.raises(CorruptData, match="bytes"):
            await restore((await run.bus("rollout-1")).partition("q"), tmp_path)
        (tmp_path / "manifest.json").unlink()
        with pytest.raises(CorruptData, match="written last"):
            await restore((await run.bus("rollout-1")).partition("q"), tmp_path)


async def test_beyond_its_capacity_a_partition_spills_to_files_that_go_with_it(tmp_path):
    async with served() as run:
        part, reader = await two(run, capacity_bytes=1 << 17, chunk_bytes=1 << 16, spill_dir=str(tmp_path))
        for i in range(10):
            await part.put({"x": np.full((1, 50_000), i, np.uint8)}, keys=[str(i)])
        assert len(list(tmp_path.iterdir())) == 8
        await run.restart()
        batch = await reader.get([str(i) for i in range(10)])
        assert [int(x[-1]) for x in batch["x"]] == list(range(10))
        assert reader.stats().ring_bytes <= 1 << 17
        await part.drop()
        assert list(tmp_path.iterdir()) == []


# ---- all partitions -------------------------------------------------------------------------------------------------


async def test_partitions_are_read_back_from_their_dump_and_end_with_an_attempt(tmp_path):
    async with served() as run:
        part, reader = await two(run, capacity_bytes=1 << 17, chunk_bytes=1 << 16, spill_dir=str(tmp_path))
        for _ in range(3):
            await part.put({"x": np.zeros((1, 50_000), np.uint8)})
        batch = await reader.stream("t", columns=["x"], batch=2).next()
        state = orjson.loads(orjson.dumps(run.fold.dump()))
        loaded = Fold.load(state)
        assert loaded.dump() == state
        assert list(expand(loaded.tables[0].tasks["t"].claims["actor-0.1", 0].rows[0])) == batch.ids
        await run.stop()
        assert len(list(tmp_path.iterdir())) == 1
        await run.start(attempt=1)
        assert run.fold.tables == {} and list(tmp_path.iterdir()) == []
        assert [path.name for path in (run.folder / "journals").iterdir()] == ["1"]


@contextmanager
def full_disk(run, monkeypatch):
    """No event is journalled while the body runs; the event says when one was tried."""

    def full(events):
        told.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    told = asyncio.Event()
    monkeypatch.setattr("rondo.comm.bus.pending.ROOM_S", 0.001)
    with monkeypatch.context() as disk:
        disk.setattr(run._journal, "append", full)
        yield told


async def test_a_full_disk_costs_time_and_no_row(monkeypatch):
    async with served() as run:
        part, reader = await two(run)
        await part.put({"x": np.arange(4)})
        stream = reader.stream("t", columns=["x"], batch=2)
        await stream.open()
        with full_disk(run, monkeypatch) as told:
            waiting = asyncio.create_task(stream.next())
            await told.wait()
            run.coordinator.tick()
            assert not waiting.done()
        run.coordinator.tick()
        assert [int(x) for x in (await waiting)["x"]] == [0, 1]
        await run.restart()
        assert run.fold.tables[0].tasks["t"].counts[CLAIMED] == 2


async def test_a_dropped_partition_has_its_memory_until_the_journal_says_so(monkeypatch):
    async with served() as run:
        part, _ = await two(run)
        await part.put({"x": np.arange(4)})
        await part.list()  # the put is in the journal
        with full_disk(run, monkeypatch) as told:
            dropping = asyncio.create_task(part.drop())
            await told.wait()
            assert part.stats().state == "open"
        run.coordinator.tick()
        await dropping
        assert all("part/0" not in name for name, _ in run.segments.stats().segments)
