"""A partition's counters in shared memory: written by the coordinator, read by any process without a call.

Owns their layout. One segment a partition; every counter is a word of its own (`words.py`), so each is exact at the moment it
is read, and two of one look may be an event apart.

    words | state rows live_bytes ring_bytes capacity put refused num_tasks |
          | ready waiting claimed done acked returned wait_p50_us wait_p99_us | ...
    names | 64 bytes a task, zero-padded, written before num_tasks counts it

Invariant: one writer, the coordinator; reading costs the same however many rows are held.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import CLAIMED, DONE, READY, WAITING
from rondo.comm.ring.words import LINE_BYTES, Words
from rondo.runtime.memory.segments import Segment

NEW, OPEN, ENDED, DROPPED = range(4)
_STATES = ("new", "open", "ended", "dropped")
MAX_TASKS = 64
MAX_NAME_BYTES = 63
_PER_PARTITION = _PER_TASK = 8
_NUM_WORDS = _PER_PARTITION + MAX_TASKS * _PER_TASK
_NAMES = _NUM_WORDS * LINE_BYTES
STATS_BYTES = _NAMES + MAX_TASKS * (MAX_NAME_BYTES + 1)
_A_DOUBLING, _NUM_BUCKETS = 4, 136
_EVERY = 8  # waits between two looks at the percentiles, which cost more than a count


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


class Waited:
    """How long readers of a task waited for their batches: a histogram of fixed size, with four buckets to a doubling from one
    microsecond to over an hour, so that a percentile is told to within a fifth."""

    def __init__(self) -> None:
        self.num_waits = 0
        self._buckets = [0] * _NUM_BUCKETS

    def add(self, seconds: float) -> None:
        bucket = math.ceil(_A_DOUBLING * math.log2(max(1.0, 1e6 * seconds)))
        self._buckets[min(bucket, _NUM_BUCKETS - 1)] += 1
        self.num_waits += 1

    def percentiles(self, *parts: float) -> list[float]:
        """For each part: the seconds within which so much of all waits ended; 0 without any."""
        below = list(accumulate(self._buckets))
        edges = [bisect_left(below, part * self.num_waits) for part in parts]
        return [1e-6 * 2.0 ** (edge / _A_DOUBLING) if self.num_waits else 0.0 for edge in edges]


class _Counters:
    """The segment as its one writer and its readers map it."""

    def __init__(self, segment: Segment, *, readonly: bool) -> None:
        self._segment = segment
        self._view = segment.view(readonly=readonly)
        self._words = Words(self._view, 0, _NUM_WORDS)

    def _name(self, at: int) -> memoryview:
        start = _NAMES + at * (MAX_NAME_BYTES + 1)
        return self._view[start : start + MAX_NAME_BYTES + 1]

    def close(self) -> None:
        del self._words, self._view
        self._segment.close()


class StatsWriter(_Counters):
    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, readonly=False)
        self._shown = [-1] * _NUM_WORDS  # a writer before this one may have died between two words
        self._waited: dict[str, tuple[Waited, list[int]]] = {}  # of a task: its waits, p50 and p99 in microseconds
        self._num_tasks = 0

    def write(self, table: Table) -> None:
        """Every counter as it is now, where it has changed, the last first: O(tasks)."""
        shelf, tasks = table.shelf, table.tasks
        words = [
            ENDED if table.ended else OPEN, table.num_rows, shelf.live_bytes, shelf.ring_bytes,
            table.spec.capacity_bytes, table.num_put, table.num_refused, len(tasks),
        ]  # fmt: skip
        for at, (name, task) in enumerate(tasks.items()):
            if at >= self._num_tasks:
                self._name(at)[:] = name.encode().ljust(MAX_NAME_BYTES + 1, b"\0")
                self._num_tasks += 1
            counts = task.counts
            words += counts[READY], counts[WAITING], counts[CLAIMED], counts[DONE], task.num_acked, task.num_returned
            words += self._waited[name][1] if name in self._waited else (0, 0)
        for word in range(len(words) - 1, -1, -1):
            if self._shown[word] != words[word]:
                self._shown[word] = words[word]
                self._words.store(word, words[word])

    def waited(self, task: str, seconds: float) -> None:
        """A reader of this task has waited so long for its batch; shown with what is written next."""
        waits, shown = self._waited.setdefault(task, (Waited(), [0, 0]))
        waits.add(seconds)
        if waits.num_waits < _EVERY or not waits.num_waits % _EVERY:
            shown[:] = [round(1e6 * wait_s) for wait_s in waits.percentiles(0.5, 0.99)]

    def drop(self) -> None:
        """The partition is gone for everybody."""
        self._words.store(0, DROPPED)
        self.close()


class StatsReader(_Counters):
    def __init__(self, segment: Segment) -> None:
        super().__init__(segment, readonly=True)

    @property
    def state(self) -> int:
        return self._words.load(0)

    def read(self) -> PartitionStats:
        load = self._words.load
        state, rows, live, rings, capacity, put, refused, num_tasks = map(load, range(_PER_PARTITION))
        tasks = {}
        for at in range(num_tasks):
            first = _PER_PARTITION + at * _PER_TASK
            ready, waiting, claimed, done, acked, returned, p50_us, p99_us = map(load, range(first, first + _PER_TASK))
            name = bytes(self._name(at)).rstrip(b"\0").decode()
            tasks[name] = TaskStats(ready, waiting, claimed, done, acked, returned, 1e-6 * p50_us, 1e-6 * p99_us)
        return PartitionStats(_STATES[state], rows, live, rings, capacity, put, refused, tasks)
