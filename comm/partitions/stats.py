"""A partition's counters in shared memory: written by the coordinator, read by any process without a call.

Owns their layout. One segment a partition; every counter is a word of its own (`words.py`), so each is exact at the moment it
is read, and two of one look may be an event apart.

    words | state rows live_bytes ring_bytes put refused num_tasks capacity |
          | ready waiting claimed done acked returned wait_p50_us wait_p99_us | ...
    names | 64 bytes a task, zero-padded, written before num_tasks counts it

Invariant: one writer, the coordinator; reading costs the same however many rows are held.
"""

from __future__ import annotations

from dataclasses import dataclass

from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import CLAIMED, DONE, READY, WAITING
from rondo.comm.ring.words import LINE_BYTES, Words
from rondo.runtime.memory.segments import Segment

OPEN, ENDED, DROPPED = 1, 2, 3
MAX_TASKS = 64
MAX_NAME_BYTES = 63
STATE, _ROWS, _LIVE, _RINGS, _PUT, _REFUSED, _NUM_TASKS, _CAPACITY = range(8)
_PER_TASK = 8
_NUM_WORDS = 8 + MAX_TASKS * _PER_TASK
_NAMES = _NUM_WORDS * LINE_BYTES
STATS_BYTES = _NAMES + MAX_TASKS * (MAX_NAME_BYTES + 1)


def stats_name(part: int) -> str:
    """The name of its segment."""
    return f"part/{part}/stats"


@dataclass(frozen=True, slots=True)
class TaskStats:
    """Rows of one task by state (`num_ready` is its depth), two counts that only grow, and how long its readers waited for a
    batch: within which time half of them had it, and 99 of 100, since the coordinator began."""

    num_ready: int
    num_waiting: int
    num_claimed: int
    num_done: int
    num_acked: int
    num_returned: int
    wait_p50_s: float
    wait_p99_s: float


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """A partition at one moment."""

    state: str
    num_rows: int
    live_bytes: int
    ring_bytes: int
    capacity_bytes: int
    num_put: int
    num_refused: int
    tasks: dict[str, TaskStats]


class StatsWriter:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._view = segment.view()
        self._words = Words(self._view, 0, _NUM_WORDS)
        self._num_tasks = 0
        self._shown = [-1] * _NUM_WORDS  # a writer before this one may have died between two words

    def write(self, table: Table) -> None:
        """Every counter as it is now, where it has changed: O(tasks)."""
        shelf, state = table.shelf, ENDED if table.ended else OPEN
        counters = table.num_rows, shelf.live_bytes, shelf.ring_bytes, table.num_put, table.num_refused
        self._store(_ROWS, counters)
        self._store(_CAPACITY, (table.spec.capacity_bytes,))
        for at, task in enumerate(table.tasks.values()):
            if at >= self._num_tasks:
                start = _NAMES + at * (MAX_NAME_BYTES + 1)
                self._view[start : start + MAX_NAME_BYTES + 1] = task.name.encode().ljust(MAX_NAME_BYTES + 1, b"\0")
            counts = task.counts
            rows = counts[READY], counts[WAITING], counts[CLAIMED], counts[DONE], task.num_acked, task.num_returned
            self._store(8 + at * _PER_TASK, rows)
        self._num_tasks = len(table.tasks)
        self._store(_NUM_TASKS, (self._num_tasks,))
        self._store(STATE, (state,))

    def waited(self, at: int, p50_s: float, p99_s: float) -> None:
        """Of the task at this place in the table."""
        self._store(8 + at * _PER_TASK + 6, (round(1e6 * p50_s), round(1e6 * p99_s)))

    def _store(self, word: int, values: tuple[int, ...]) -> None:
        """Words from `word` on, those that are not there yet."""
        shown, store = self._shown, self._words.store
        for value in values:
            if shown[word] != value:
                shown[word] = value
                store(word, value)
            word += 1

    def close(self, *, dropped: bool = False) -> None:
        if dropped:
            self._words.store(STATE, DROPPED)
        del self._words, self._view
        self._segment.close()


class StatsReader:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._view = segment.view(readonly=True)
        self._words = Words(self._view, 0, _NUM_WORDS)

    @property
    def state(self) -> int:
        return self._words.load(STATE)

    def read(self) -> PartitionStats:
        load = self._words.load
        tasks = {}
        for at in range(load(_NUM_TASKS)):
            start, word = _NAMES + at * (MAX_NAME_BYTES + 1), 8 + at * _PER_TASK
            name = bytes(self._view[start : start + MAX_NAME_BYTES + 1]).rstrip(b"\0").decode()
            ready, waiting, claimed, done, acked, returned, p50_us, p99_us = (load(word + i) for i in range(_PER_TASK))
            tasks[name] = TaskStats(ready, waiting, claimed, done, acked, returned, 1e-6 * p50_us, 1e-6 * p99_us)
        return PartitionStats(
            {OPEN: "open", ENDED: "ended", DROPPED: "dropped"}.get(load(STATE), "new"),
            load(_ROWS), load(_LIVE), load(_RINGS), load(_CAPACITY), load(_PUT), load(_REFUSED), tasks,
        )  # fmt: skip

    def close(self) -> None:
        del self._words, self._view
        self._segment.close()
