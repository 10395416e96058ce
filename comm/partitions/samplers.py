"""Which ready rows come next, and to which rank: one chooser for every kind of `spec.Sampler` that is ours.

Owns the order in which ready rows are taken. Changes no state: what it picks becomes a claim event, and only that moves rows.
A chooser is derived from the task's states and made anew after a restart. Rows leave it when they are picked; those that are
cleared stay in its containers until they are met, so every row is looked at again when it is taken.

    add(run)     these rows became ready (again)
    pick(ask)    rows for every rank, as runs; None when there are not enough yet

Invariant: `pick` costs as much as it takes (times the logarithm of what is held), and returns only rows that are ready, each
once; a pick that returns None leaves them all where they were.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rondo.comm.partitions.differencing import balanced
from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, compress, count, cut, even, expand, number_of
from rondo.comm.partitions.spec import Balanced, Groups, Ordered, Sequential, TokenBudget, VersionWindow
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import READY, Task
from rondo.runtime.errors import SamplerFailed

Runs = list[list[int]]
Picked = list[Runs]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a reader wants: at most `batch` rows for each of `ranks` ranks."""

    ranks: int
    batch: int
    partial: bool = False  # fewer will do
    ended: bool = False  # no row will become ready any more
    version: int = 0  # the policy version that staleness counts back from


class Chooser:
    """What all have in common: `fresh` rows wait here until somebody asks. Subclasses take them in and pick."""

    def __init__(self, table: Table, task: Task) -> None:
        self.table, self.task = table, task
        self.fresh: list[tuple[int, int]] = list(task.ready_runs())
        self.mark = task.mark

    def add(self, start: int, length: int) -> None:
        self.fresh.append((start, length))

    def pick(self, ask: Ask) -> Picked | None:
        fresh, self.fresh = self.fresh, []
        for start, length in fresh:
            self.admit(start, length)
        return self.choose(ask)

    def admit(self, start: int, length: int) -> None:
        raise NotImplementedError

    def choose(self, ask: Ask) -> Picked | None:
        raise NotImplementedError

    def is_ready(self, id: int) -> bool:
        return self.task.state(id) == READY


class Queue:
    """Rows by id. Holds runs; gives only what is ready."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._heap: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, start: int, length: int) -> None:
        heapq.heappush(self._heap, (start, length))

    def take(self, num_rows: int) -> Runs:
        """The first ready rows, at most so many; they are out of the queue."""
        taken: Runs = []
        while num_rows and self._heap:
            start, length = heapq.heappop(self._heap)
            for first, rows in self._ready(start, length):
                part = min(rows, num_rows)
                if part:
                    taken.append([first, part])
                    num_rows -= part
                if part < rows:
                    self.add(first + part, rows - part)
        return taken

    def give_back(self, runs: Runs) -> None:
        for start, length in runs:
            self.add(start, length)

    def _ready(self, start: int, length: int) -> Runs:
        states = self._task.states.get(start >> ROW_BITS)
        if states is None:
            return []
        first = start & ROW_MASK
        part = states[first : first + length]
        if part.count(READY) == length:
            return [[start, length]]
        return compress([start + i for i, state in enumerate(part) if state == READY])


class SequentialChooser(Chooser):
    def __init__(self, table: Table, task: Task, sampler: Sequential | Balanced) -> None:
        super().__init__(table, task)
        self._queue = Queue(task)
        self._sampler = sampler

    def admit(self, start: int, length: int) -> None:
        self._queue.add(start, length)

    def choose(self, ask: Ask) -> Picked | None:
        ready, want = self.task.num_ready, ask.ranks * ask.batch
        if not ready or (ready < want and not ask.partial):
            return None
        runs = self._queue.take(want)
        total = count(runs)
        sizes = [ask.batch] * ask.ranks if total == want else even(total, ask.ranks)
        return self._deal(runs, sizes)

    def _deal(self, runs: Runs, sizes: list[int]) -> Picked:
        return cut(runs, sizes)


class BalancedChooser(SequentialChooser):
    def _deal(self, runs: Runs, sizes: list[int]) -> Picked:
        ids = list(expand(runs))
        costs = [self.table.entry(id).cost(id & ROW_MASK) for id in ids]
        assert isinstance(self._sampler, Balanced)
        parts = balanced(costs, len(sizes), equal_size=self._sampler.equal_size)
        return [compress([ids[i] for i in part]) for part in parts]


class BudgetChooser(Chooser):
    def __init__(self, table: Table, task: Task, sampler: TokenBudget) -> None:
        super().__init__(table, task)
        self._queue = Queue(task)
        self._budget = sampler.tokens

    def admit(self, start: int, length: int) -> None:
        self._queue.add(start, length)

    def choose(self, ask: Ask) -> Picked | None:
        if not self.task.num_ready:
            return None
        ids = list(expand(self._queue.take(ask.ranks * ask.batch)))
        parts: list[list[int]] = []
        at, full = 0, True
        for _ in range(ask.ranks):
            part: list[int] = []
            total = 0
            while at < len(ids) and len(part) < ask.batch:
                id = ids[at]
                cost = self.table.entry(id).cost(id & ROW_MASK)
                if part and total + cost > self._budget:
                    break
                part.append(id)
                total, at = total + cost, at + 1
            full = full and (at < len(ids) or len(part) == ask.batch or total >= self._budget)
            parts.append(part)
        if not full and not ask.partial:
            self._queue.give_back(compress(ids))
            return None
        self._queue.give_back(compress(ids[at:]))
        return [compress(part) for part in parts]


class WindowChooser(Chooser):
    def __init__(self, table: Table, task: Task, sampler: VersionWindow) -> None:
        super().__init__(table, task)
        self._sampler = sampler
        self._queues: dict[int | None, Queue] = {}

    def admit(self, start: int, length: int) -> None:
        entry = self.table.entries.get(start >> ROW_BITS)
        if entry is None:
            return  # cleared since
        if not isinstance(entry.versions, list):
            self._queue(entry.versions).add(start, length)
            return
        for id in range(start, start + length):
            self._queue(entry.version(id & ROW_MASK)).add(id, 1)

    def choose(self, ask: Ask) -> Picked | None:
        want = ask.ranks * ask.batch
        runs: Runs = []
        taken: list[tuple[Queue, Runs]] = []
        for version in self._inside(ask.version):
            queue = self._queues[version]
            part = queue.take(want - count(runs))
            taken.append((queue, part))
            runs += part
            if not queue:
                del self._queues[version]
        total = count(runs)
        if not total or (total < want and not ask.partial):
            for version, part in ((self._version(part), part) for _, part in taken if part):
                for start, length in part:
                    self._queue(version).add(start, length)
            return None
        return cut(runs, [ask.batch] * ask.ranks if total == want else even(total, ask.ranks))

    def _inside(self, now: int) -> list[int | None]:
        """Versions in the window, oldest first. Rows without a version are inside only where there are no bounds."""
        s = self._sampler
        low = max(
            -1 if s.min_version is None else s.min_version, -1 if s.max_staleness is None else now - s.max_staleness
        )
        bounded = (s.min_version, s.max_version, s.max_staleness) != (None, None, None)
        known = sorted(version for version in self._queues if version is not None)
        inside: list[int | None] = [v for v in known if v >= low and (s.max_version is None or v <= s.max_version)]
        return inside if bounded or None not in self._queues else [None, *inside]

    def _version(self, runs: Runs) -> int | None:
        return self.table.entry(runs[0][0]).version(runs[0][0] & ROW_MASK)

    def _queue(self, version: int | None) -> Queue:
        found = self._queues.get(version)
        if found is None:
            found = self._queues[version] = Queue(self.task)
        return found


class GroupsChooser(Chooser):
    """A group's rows are gathered until there are enough; a further row begins the group's next set."""

    def __init__(self, table: Table, task: Task, sampler: Groups) -> None:
        super().__init__(table, task)
        self._size = sampler.rows_per_group
        self._gathered: dict[Any, list[int]] = {}  # fewer than a whole set each
        self._whole: list[tuple[list[int], Any]] = []  # (rows in order, group), by their first row

    def admit(self, start: int, length: int) -> None:
        entry = self.table.entries.get(start >> ROW_BITS)
        for id in range(start, start + length) if entry is not None else ():
            assert entry is not None
            group = entry.group(id & ROW_MASK)
            if group is not None and self.is_ready(id):
                self._gather(group, id)

    def _gather(self, group: Any, id: int) -> None:
        rows = self._gathered.setdefault(group, [])
        rows.append(id)
        if len(rows) == self._size:
            heapq.heappush(self._whole, (sorted(self._gathered.pop(group)), group))

    def choose(self, ask: Ask) -> Picked | None:
        each = ask.batch // self._size
        if not each:
            raise SamplerFailed(
                f"a batch must hold a whole group of {self._size} rows, got a batch of {ask.batch}. Make it larger."
            )
        want = each * ask.ranks
        if len(self._whole) < want and not ask.partial:
            return None
        taken: list[tuple[list[int], Any]] = []
        while self._whole and len(taken) < want:
            rows, group = heapq.heappop(self._whole)
            ready = [id for id in rows if self.is_ready(id)]
            if len(ready) == self._size:
                taken.append((rows, group))
                continue
            for id in ready:  # some were cleared since: the others wait for more of their group
                self._gather(group, id)
        if not taken or (len(taken) < want and not ask.partial):
            for item in taken:
                heapq.heappush(self._whole, item)
            return None
        sizes = [each] * ask.ranks if len(taken) == want else even(len(taken), ask.ranks)
        parts, at = [], 0
        for size in sizes:
            parts.append(compress([id for rows, _ in taken[at : at + size] for id in rows]))
            at += size
        return parts


class OrderedChooser(Chooser):
    def __init__(self, table: Table, task: Task, sampler: Ordered) -> None:
        super().__init__(table, task)
        self._seed, self._window = sampler.seed, sampler.window
        self._heap: list[tuple[int, int]] = []  # (place in the order, row)
        if self._window is not None:  # rows that were read before a restore do not hold up those behind them
            read = {self._place(table.entry(id).key(id & ROW_MASK)) for id in expand(task.done_runs())}
            while (place := self._behind_cleared(self.mark)) in read:
                self.mark = place + 1

    def admit(self, start: int, length: int) -> None:
        entry = self.table.entries.get(start >> ROW_BITS)
        for id in range(start, start + length) if entry is not None else ():
            assert entry is not None
            heapq.heappush(self._heap, (self._place(entry.key(id & ROW_MASK)), id))

    def choose(self, ask: Ask) -> Picked | None:
        if self._window is None and not ask.ended:
            return None
        want, mark = ask.ranks * ask.batch, self._behind_cleared(self.mark)
        taken: list[tuple[int, int]] = []
        while self._heap and len(taken) < want:
            place, id = self._heap[0]
            if not self.is_ready(id):
                heapq.heappop(self._heap)  # cleared since
            elif self._window is None or place <= mark or ask.ended:
                taken.append(heapq.heappop(self._heap))
                mark = self._behind_cleared(max(mark, place + 1))
            else:
                break
        if not taken or (len(taken) < want and not ask.partial):
            for item in taken:
                heapq.heappush(self._heap, item)
            return None
        self.mark = mark
        sizes = [ask.batch] * ask.ranks if len(taken) == want else even(len(taken), ask.ranks)
        return cut(compress([id for _, id in taken]), sizes)

    def _behind_cleared(self, mark: int) -> int:
        """The first place from `mark` on whose row was not cleared: nobody waits for one that was, met before or not."""
        if self._window is None:
            return mark
        while self._number_at(mark) in self.table.cleared:
            mark += 1
        return mark

    def _number_at(self, place: int) -> int:
        """The key that an order in windows has at this place."""
        assert self._window is not None
        window, at = divmod(place, self._window)
        return window * self._window + _unshuffled(self._seed, window, self._window)[at]

    def _place(self, key: str | None) -> int:
        if key is None:
            raise SamplerFailed("rows in a fixed order must have keys, got rows without. Put them with keys=.")
        if self._window is None:
            return int.from_bytes(hashlib.blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest(), "big")
        number = number_of(key)
        if number is None:
            raise SamplerFailed(
                f"keys of rows in shuffled windows must be numbers below 10**18, got {key[:40]!r}. Use window=None."
            )
        window, place = divmod(number, self._window)
        return window * self._window + _shuffled(self._seed, window, self._window)[place]


@lru_cache(maxsize=64)
def _shuffled(seed: int, window: int, size: int) -> list[int]:
    """Where each place of a window goes."""
    places = list(range(size))
    random.Random(f"{seed}/{window}").shuffle(places)
    return places


@lru_cache(maxsize=64)
def _unshuffled(seed: int, window: int, size: int) -> list[int]:
    """Where each place of a window comes from."""
    return sorted(range(size), key=_shuffled(seed, window, size).__getitem__)
