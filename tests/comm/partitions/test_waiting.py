"""Who waits at a partition is asked again by everything that can help it, and the dead are not."""

from __future__ import annotations

import asyncio

import numpy as np

from rondo.comm.partitions.spec import Ordered, VersionWindow
from tests.comm.partitions.hand import Hand
from tests.comm.partitions.world import served

PATIENCE_S = 60.0


def rows(count: int) -> dict[str, list[np.ndarray]]:
    return {"tokens": [np.arange(5, dtype=np.int32) + i for i in range(count)]}


async def test_a_reader_gets_the_last_rows_when_their_last_column_comes_after_the_end() -> None:
    async with served() as run:
        writer, reader = await run.bus("rollout-0"), await run.bus("rollout-1")
        part = writer.partition("p")
        await part.put(rows(3), keys=["a", "b", "c"])
        stream = reader.partition("p").stream("t", columns=["tokens", "score"], batch=64, ranks=1, rank=0)
        await stream.open()
        await part.end()
        asked = asyncio.create_task(stream.next())
        await part.list()  # the claim has arrived
        await part.add(["a", "b", "c"], {"score": np.ones(3, np.float32)})
        batch = await asyncio.wait_for(asked, PATIENCE_S)
        assert batch is not None and len(batch) == 3


async def test_ranks_that_ask_under_different_versions_get_the_same_batch() -> None:
    async with served() as run:
        writer, reader = await run.bus("rollout-0"), await run.bus("rollout-1")
        part = reader.partition("p")
        await writer.partition("p").put(rows(4), policy_versions=4)
        window = VersionWindow(max_staleness=0)
        late = part.stream("t", columns=["tokens"], batch=2, rank=1, ranks=2, sampler=window, version=lambda: 5)
        early = part.stream("t", columns=["tokens"], batch=2, rank=0, ranks=2, sampler=window, version=lambda: 4)
        await late.open()
        await early.open()
        asked = asyncio.create_task(late.next())
        await part.list()
        assert len(await asyncio.wait_for(early.next(), PATIENCE_S) or ()) == 2
        assert len(await asyncio.wait_for(asked, PATIENCE_S) or ()) == 2


async def test_a_reader_that_is_proved_dead_while_it_waits_claims_nothing() -> None:
    async with served() as run:
        writer, dead, reader = [await run.bus(name) for name in ("rollout-0", "actor-0", "rollout-1")]
        part = writer.partition("p")
        await part.opened()
        stream = dead.partition("p").stream("t", columns=["tokens"], batch=2)
        await stream.open()
        asked = asyncio.create_task(stream.next())
        await dead.partition("p").list()
        await run.die("actor-0")
        await part.put(rows(2))
        batch = await asyncio.wait_for(
            reader.partition("p").stream("t", columns=["tokens"], batch=2).next(), PATIENCE_S
        )
        assert batch is not None and len(batch) == 2
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


def test_rows_that_were_read_before_a_restore_do_not_hold_up_an_ordered_window() -> None:
    hand = Hand()
    hand.task(sampler=Ordered(window=1))
    hand.put(4, keys=["0", "1", "2", "3"], done={"t": [[0, 2]]})
    assert hand.claim(batch=1)
