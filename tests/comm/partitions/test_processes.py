from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rondo.comm.bus.member import Member
from rondo.comm.partitions.client import Partitions
from tests.comm.partitions.world import Served, served

ROOT = Path(__file__).parents[3]


class Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def word(self) -> Any:
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert line, "the worker ended"
        return json.loads(line)

    async def words(self) -> list[Any]:
        """Everything it says up to and without "end"."""
        said = []
        while (word := await self.word()) != "end":
            said.append(word)
        return said

    async def kill(self) -> list[int]:
        """SIGKILL; the rows that it had said and nobody had heard."""
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        whole = (await self.process.stdout.read()).rpartition(b"\n")[0]
        return [value for line in whole.splitlines() for value in json.loads(line)]


@asynccontextmanager
async def workers(run: Served) -> AsyncIterator[Any]:
    started: list[Worker] = []

    async def start(group: str, act: str, *arguments: Any, incarnation: int = 1) -> Worker:
        run.roster.alive[group] = incarnation
        await run.ref().call("member_started", group, incarnation, 1)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.comm.partitions.worker", str(run.folder), group, str(incarnation), act,
            json.dumps(arguments), cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        worker = Worker(process)
        started.append(worker)
        assert await worker.word() == "open"
        return worker

    try:
        yield start
    finally:
        for worker in started:
            if worker.process.returncode is None:
                worker.process.stdin.close()
                await asyncio.wait_for(worker.process.wait(), 120)


async def test_several_producers_and_consumers_in_processes_move_every_row_once():
    async with served() as run, workers(run) as start:
        part = (await run.bus("advantages-0")).partition("p", num_producers=1)
        producers = await asyncio.gather(*(start(f"rollout-{i}", "produce", 500 * i, 500, 20) for i in range(2)))
        consumers = await asyncio.gather(
            *(start(group, "consume", "t", 16, 10_000, 0, 1) for group in ("actor-0", "actor_fwd-0"))
        )
        for producer in producers:
            assert await producer.word() == "put"
        await part.end()
        said = await asyncio.gather(*(consumer.words() for consumer in consumers))
        assert sorted(value for batches in said for batch in batches for value in batch) == list(range(1000))
        assert part.stats().tasks["t"].num_acked == 1000


async def test_rows_of_a_killed_consumer_come_again_and_acknowledged_ones_do_not():
    async with served() as run, workers(run) as start:
        part = (await run.bus("rollout-0")).partition("p")
        producer = await start("rollout-1", "produce", 0, 60, 20)
        assert await producer.word() == "put"
        await part.end()
        victim = await start("actor-0", "consume", "t", 10, 30, 0, 1)
        seen = [await victim.word() for _ in range(3)]
        await victim.kill()
        await run.die("actor-0")
        assert (part.stats().tasks["t"].num_returned, part.stats().tasks["t"].num_acked) == (10, 20)
        again = await start("actor-0", "consume", "t", 10, 1000, 0, 1, incarnation=2)
        rest = [value for batch in await again.words() for value in batch]
        assert sorted(seen[0] + seen[1] + rest) == list(range(60))
        assert set(seen[2]) <= set(rest)


async def test_rows_of_a_killed_producer_stay_and_its_next_life_goes_on_in_its_ring():
    async with served() as run, workers(run) as start:
        part = (await run.bus("actor-0")).partition("p")
        producer = await start("rollout-0", "produce", 0, 40, 20)
        assert await producer.word() == "put"
        await producer.kill()
        await run.die("rollout-0")
        batch = await part.get([str(value) for value in range(40)], ["x"])
        assert [int(value) for value in batch["x"]] == list(range(40))
        producer = await start("rollout-0", "produce", 40, 40, 20, incarnation=2)
        assert await producer.word() == "put"
        assert len(await part.get([str(value) for value in range(80)], ["x"])) == 80
        table = run.fold.tables[0]
        assert len(table.shelf.rings) == 1
        await producer.kill()
        await run.die("rollout-0", 2)
        await part.clear()
        assert not table.shelf.rings and part.stats().ring_bytes == 0


async def test_a_coordinator_that_dies_between_any_two_acts_comes_back_with_the_same_state():
    async with served() as run, workers(run) as start:
        part = (await run.bus("rollout-0")).partition("p")
        consumer = await start("actor-0", "consume", "t", 4, 1000, 0, 1)
        seen = []
        for first in range(0, 24, 4):
            await part.put(
                {"x": list(range(first, first + 4))} | {"y": ["a"] * 4}, keys=[str(first + i) for i in range(4)]
            )
            await run.restart()
            before = run.fold.dump()
            await run.restart()
            assert run.fold.dump() == before
            seen += await consumer.word()
        await part.clear(["0", "1"])
        await part.end()
        await run.restart()
        assert await consumer.words() == []
        assert sorted(seen) == list(range(24))
        assert len((await part.list())[0]) == part.stats().num_rows == 22


async def test_every_peer_of_a_rank_gets_the_same_rows_and_all_of_them_finish_a_row():
    async with served() as run:
        run.roster.alive["actor-0"] = 1
        await run.ref().call("member_started", "actor-0", 1, 4)
        ranks = [Partitions(Member("actor-0", 1, rank, 4, 0), run.ref(), run.client()) for rank in range(4)]
        run.buses += ranks
        part = ranks[0].partition("p")
        await part.put({"x": list(range(10))})
        await part.end()
        streams = [
            bus.partition("p").stream("t", columns=["x"], batch=2, rank=rank // 2, ranks=2)
            for rank, bus in enumerate(ranks)
        ]
        found: list[list[list[int]]] = [[] for _ in ranks]
        for _ in range(3):
            batches = [await stream.next() for stream in streams]
            assert part.stats().tasks["t"].num_claimed == sum(len(batch) for batch in batches[::2])
            for rank, batch in enumerate(batches):
                found[rank].append(batch["x"])
                batch.ack()
            await streams[0].flush()
            assert part.stats().tasks["t"].num_claimed == sum(len(batch) for batch in batches[::2])
            for stream in streams:
                await stream.flush()
        assert [await stream.next() for stream in streams] == [None] * 4
        assert found[0] == found[1] == [[0, 1], [4, 5], [8]] and found[2] == found[3] == [[2, 3], [6, 7], [9]]


async def test_no_row_is_lost_when_consumers_and_the_coordinator_die_while_producers_wait_for_room():
    async with served() as run, workers(run) as start:
        part = (await run.bus("advantages-0")).partition(
            "p", capacity_bytes=1 << 17, chunk_bytes=1 << 16, clear_after=("t",)
        )
        await part.opened()
        producers = await asyncio.gather(*(start(f"rollout-{i}", "produce", 2000 * i, 2000, 5) for i in range(2)))
        seen: list[int] = []
        for incarnation in range(1, 5):
            consumer = await start("actor-0", "consume", "t", 7, 10_000, 0, 1, incarnation=incarnation)
            for _ in range(20):
                seen += await consumer.word()
            seen += await consumer.kill()
            await run.restart()
            await run.die("actor-0", incarnation)
            await run.restart()
        consumer = await start("actor-0", "consume", "t", 64, 10_000, 0, 1, incarnation=5)
        rest = asyncio.create_task(consumer.words())
        for producer in producers:
            assert await producer.word() == "put"
        await part.end()
        seen += [value for batch in await rest for value in batch]
        stats = part.stats()
        assert set(seen) == set(range(4000))
        assert len(seen) - 4000 <= stats.tasks["t"].num_returned <= 4 * 7
        assert (stats.num_rows, stats.live_bytes, stats.num_put) == (0, 0, 4000)
