"""A process that uses a partition, killed at its n-th store or journal write, for every n, or every third: what was put is there.

As `tests/comm/bus/test_crash_points.py`, with a partition's acts: puts of rows by key, a column added by another role, claims,
acknowledgements, a row cleared by name, rows cleared because they were read, the end.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rondo.comm.partitions.stats import STATS_BYTES, stats_name
from tests.comm.bus.test_crash_points import Log, in_child, plant
from tests.comm.inprocess import MEMBERS, Store, ask
from tests.comm.partitions.scripted import key, leftovers, numbers_of, put, score
from tests.comm.partitions.world import InProcess
from tests.strength import strength

NUM_ROWS, CLEARED = 4, 3
MEMORY = {stats_name(0): STATS_BYTES, "part/0/rollout-0.0/0": 1 << 16, "part/0/actor_fwd-0.0/1": 1 << 16}
SETTINGS = {"capacity_bytes": 1 << 17, "chunk_bytes": 1 << 16, "clear_after": ("train",)}


async def parts(run: InProcess, lives: dict[str, int]) -> list[Any]:
    """The partition in the hands of its writer, its scorer and its reader."""
    names = ("rollout-0", "actor_fwd-0", "actor-0")
    return [(await run.bus(name, lives[name])).partition("p", **SETTINGS) for name in names]


async def work(run: InProcess, lives: dict[str, int], put_rows: Log, read_rows: Log) -> list[int]:
    """From wherever the partition is to its end; what was read here. Puts by key are repeated without harm."""
    writer, scorer, reader = await parts(run, lives)
    read: list[int] = []
    await writer.opened()
    if writer.stats().state != "ended":
        for at in range(0, NUM_ROWS, 2):
            await put(writer, [at, at + 1])
            put_rows.count()
        await writer.clear([key(CLEARED)])
        await writer.end()
    scores = scorer.stream("score", columns=["x"], batch=2)
    while (batch := await ask(scores.next(), 20)) is not None:
        await score(scorer, batch)
        batch.ack()
        await scorer.flush()
    train = reader.stream("train", columns=["x", "score"], batch=2)
    while (batch := await ask(train.next(), 20)) is not None:
        read += numbers_of(batch)
        batch.ack()
        await reader.flush()
        for _ in range(len(batch)):
            read_rows.count()
    return read


def make_run(folder: Path, store: Store) -> InProcess:
    return InProcess(folder, store)


async def first_life(folder: Path, store: Store, put_rows: Log, read_rows: Log) -> None:
    run = make_run(folder, store)
    await run.start()
    await work(run, dict.fromkeys(MEMBERS, 1), put_rows, read_rows)


async def second_life(folder: Path, store: Store, put_rows: Log, read_rows: Log, *, writer_lives: bool) -> None:
    run = make_run(folder, store)
    lives = {"rollout-0"} if writer_lives else set()
    run.roster.groups = {name: {"incarnation": 1, "alive": True} for name in lives}
    run.roster.dead = [[name, 1] for name in MEMBERS if name not in lives]
    await run.start()
    found = list(run.fold.tables.values())
    num_put = found[0].num_put if found else 0
    assert 2 * len(put_rows) <= num_put <= 2 * len(put_rows) + 2, f"{num_put} rows, {len(put_rows)} puts had returned"
    acked = found[0].tasks["train"].num_acked if found and "train" in found[0].tasks else 0
    assert len(read_rows) <= acked, f"{acked} rows are acknowledged, {len(read_rows)} had been"
    read = await work(run, {name: 1 if name in lives else 2 for name in MEMBERS}, put_rows, read_rows)
    (table,) = run.fold.tables.values()
    assert len(read) == len(set(read)) == NUM_ROWS - 1 - acked, (
        "what was acknowledged does not come again, all else does"
    )
    assert CLEARED not in read and table.tasks["train"].num_acked == NUM_ROWS - 1
    assert (table.num_rows, table.shelf.live_bytes, table.ended) == (0, 0, True)
    assert leftovers(run.coordinator) == 0
    before = run.fold.dump()
    await run.stop()
    await run.start()
    assert run.fold.dump() == before


def crash_at(folder: Path, kind: str, nth: int, when: str) -> bool:
    """One crash and the life after it; False when the partition came to its end before its n-th act."""
    folder.mkdir()
    store, put_rows, read_rows = Store(), Log(), Log()
    for name, num_bytes in MEMORY.items():
        store.segment(name, num_bytes)  # made before the fork: the supervisor's, not the child's

    def first() -> Any:
        plant(kind, nth, when)
        return first_life(folder, store, put_rows, read_rows)

    try:
        status, text = in_child(first)
        assert status in (0, signal.SIGKILL), text
        if status == 0:
            return False
        alive = nth % 2 == 0
        status, text = in_child(lambda: second_life(folder, store, put_rows, read_rows, writer_lives=alive))
        assert status == 0, f"killed {when} {kind} {nth}, writer {'lives' if alive else 'died'}:\n{text}"
        return True
    finally:
        store.close()


@pytest.mark.parametrize(
    ("kind", "when", "at_least"),
    [("store", "after", 40), ("write", "after", 12), ("write", "torn", 12)],
)
def test_a_crash_at_every_act_loses_nothing(tmp_path: Path, kind: str, when: str, at_least: int) -> None:
    nth = 1
    while crash_at(tmp_path / str(nth), kind, nth, when):
        nth += strength(quick=3, full=1)  # odd and even ones in turn
    assert nth > at_least
