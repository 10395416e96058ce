"""The waiting code of partitions under many orders of its callbacks. RONDO_SCHEDULES=N runs N."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from rondo.comm.bus.wakes import Wakes
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.waits import wait_for
from tests.comm.bus.test_schedules import LateWakes
from tests.comm.inprocess import Store
from tests.comm.partitions.scripted import ROWS_A_PUT, key, leftovers, numbers_of, put, score
from tests.comm.partitions.world import InProcess
from tests.schedules import Stuck, explore
from tests.strength import strength

NUM_SCHEDULES = int(os.environ.get("RONDO_SCHEDULES", strength(quick=60, full=200)))
NUM_ROWS, LONG = 8, 6000  # a put fills a ring: the next one waits until its rows are read and cleared


def whole_partition(folder: Path, wakes: type[Wakes] = Wakes) -> Callable[[], Coroutine[Any, Any, None]]:
    """Two producers that wait for room, a scorer, two readers that compete; beside them a reader of pairs, one that waits for a
    key, and one that gives up."""
    numbers = itertools.count()

    async def scenario() -> None:
        store = Store()
        run = InProcess(folder / str(next(numbers)), store)
        try:
            await run.start()
            run.coordinator.wakes = wakes()
            names = ("rollout-0", "rollout-1", "actor_fwd-0", "advantages-0", "actor-0")
            buses = [await run.bus(name) for name in names]
            settings = {
                "capacity_bytes": 1 << 16,
                "chunk_bytes": 1 << 16,
                "num_producers": 2,
                "clear_after": ("train",),
            }
            first, second, scorer, one, two = [bus.partition("p", **settings) for bus in buses]
            notes = [bus.partition("notes", num_producers=2, capacity_bytes=1 << 16) for bus in buses]
            read: list[int] = []
            paired = asyncio.Event()

            async def produce(part: Any, note: Any, start: int) -> None:
                for at in range(start, start + NUM_ROWS // 2, ROWS_A_PUT):
                    await put(part, range(at, at + ROWS_A_PUT), LONG)
                await part.end()
                await put(note, [start])
                await paired.wait()  # an end would wake whoever waits too
                await note.end()

            async def add_scores() -> None:
                async for batch in scorer.stream("score", columns=["x"], batch=3, partial=True):
                    await score(scorer, batch)
                    batch.ack()
                await scorer.flush()

            async def train(part: Any) -> None:
                async for batch in part.stream("train", columns=["x", "score"], batch=2, partial=True):
                    read.extend(numbers_of(batch))
                    batch.ack()
                await part.flush()

            async def pairs() -> None:
                stream = notes[2].stream("pairs", columns=["x"], batch=2)
                assert sorted(numbers_of(await stream.next())) == [0, NUM_ROWS // 2]
                paired.set()
                assert await stream.next() is None

            async def ask() -> None:
                assert numbers_of(await notes[3].get([key(0), key(NUM_ROWS // 2)], ["x"], wait=True))

            async def impatient() -> None:
                with pytest.raises(DeadlineExceeded):
                    await wait_for(notes[4].get(["nobody"], wait=True), name="row", peer="nobody", deadline_s=1.0)

            acts = {
                "first": produce(first, notes[0], 0), "second": produce(second, notes[1], NUM_ROWS // 2),
                "score": add_scores(), "one": train(one), "two": train(two), "pairs": pairs(), "ask": ask(),
                "impatient": impatient(),
            }  # fmt: skip
            async with asyncio.TaskGroup() as tasks:
                for name, act in acts.items():
                    tasks.create_task(act, name=name)
            assert sorted(read) == list(range(NUM_ROWS))
            assert leftovers(run.coordinator) == 0, "a waiter was left behind"
            assert one.stats().num_rows == one.stats().live_bytes == 0
            for bus in buses:
                bus.close()
        finally:
            await run.stop()
            store.close()

    return scenario


def test_no_order_of_hundreds_loses_a_wake_up_or_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distinct, failed = explore(whole_partition(tmp_path), NUM_SCHEDULES)
    with capsys.disabled():
        print(f" [{distinct} distinct interleavings in {NUM_SCHEDULES} schedules]", end="")
    assert not failed, failed[:3]
    assert distinct > NUM_SCHEDULES // 2


class StuckWakes(Wakes):
    """Plans that came to nothing are never made again."""

    def wake(self, topics: Iterable[str]) -> None:
        vain, self._vain = self._vain, {}
        super().wake(topics)
        self._vain = vain


@pytest.mark.parametrize("planted", [LateWakes, StuckWakes])
def test_a_planted_lost_wake_up_is_found(planted: type[Wakes], tmp_path: Path) -> None:
    _, failed = explore(whole_partition(tmp_path, planted), min(NUM_SCHEDULES, 20))
    assert any(Stuck.__name__ in error or DeadlineExceeded.__name__ in error for _, error in failed)
