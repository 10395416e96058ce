from __future__ import annotations

from typing import Any

import numpy as np

from rondo.comm.partitions.stats import STATS_BYTES, StatsReader, StatsWriter, Waited
from tests.comm.memory import MemorySegment
from tests.comm.partitions.hand import Hand
from tests.comm.partitions.world import served


def test_percentiles_are_those_of_the_waits_to_within_a_fifth() -> None:
    waited = Waited()
    assert waited.percentiles(0.5, 0.99) == [0.0, 0.0]
    seconds = np.random.default_rng(0).lognormal(-7, 2, 2000)
    for value in seconds:
        waited.add(float(value))
    for part, found in zip((0.1, 0.5, 0.99), waited.percentiles(0.1, 0.5, 0.99), strict=True):
        exact = float(np.quantile(seconds, part, method="inverted_cdf"))
        assert exact <= found <= 1.2 * max(exact, 1e-6)


def test_waits_shorter_and_longer_than_all_buckets_are_counted_in_the_outermost() -> None:
    waited = Waited()
    waited.add(0.0)
    assert waited.percentiles(1.0) == [1e-6]
    waited.add(1e9)
    assert waited.percentiles(0.5)[0] == 1e-6 and waited.percentiles(1.0)[0] > 3600


def test_a_writer_of_counters_shows_its_own_and_none_of_the_one_before() -> None:
    """A coordinator may die with counters half shown; the next one knows nothing of them."""
    segment, hand = MemorySegment(STATS_BYTES), Hand()
    hand.task()
    hand.put(5)
    before: Any = segment
    StatsWriter(before).write(hand.table)
    reader = StatsReader(before)
    assert (reader.read().num_rows, reader.read().tasks["t"].num_ready) == (5, 5)
    fresh = Hand()
    fresh.task()
    StatsWriter(before).write(fresh.table)
    assert (reader.read().num_rows, reader.read().tasks["t"].num_ready) == (0, 0)


async def test_how_long_readers_wait_is_in_the_counters_of_the_task_and_partitions_in_those_of_the_bus() -> None:
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("replay")
        await part.put({"x": np.arange(12)})
        await part.end()
        async for batch in part.stream("t", columns=["x"], batch=4):
            batch.ack()
        shown = part.stats().tasks["t"]
        assert 0 < shown.wait_p50_s <= shown.wait_p99_s
        status = (await run.ref().call("stats"))["replay"]
        assert (status["rows"], status["put"], status["ended"]) == (12, 12, True)
        assert status["tasks"] == {"t": {"ready": 0, "waiting": 0, "claimed": 0, "done": 12, "returned": 0}}
