"""Which ready rows come next, and to which rank: one chooser for every kind of `spec.Sampler` that is ours.

Owns the order in which ready rows are taken, and how they are dealt to ranks. All but whole groups are one queue: a row stands in
a lane, at a place of its order, and neighbours that stand alike are one item.

    sequential, balanced, token budget     one lane, by row id
    version window                         a lane a version; those in the window are open, oldest first
    ordered                                one lane, by the place that key and seed give
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from rondo.comm.partitions.choosers import Ask, Chooser, Picked
from rondo.comm.partitions.entry import Entry
from rondo.comm.partitions.own import OwnChooser
from rondo.comm.partitions.runs import compress, count, cut, even, expand, number_of, row_id
from rondo.comm.partitions.spec import Balanced, Groups, Ordered, TokenBudget, VersionWindow, load_sampler
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import DONE, READY, Runs, Task
from rondo.runtime.errors import SamplerFailed


class Queue(Chooser):
    """Rows in the order of their ids, and what the other kinds do otherwise."""

    counts_rows = True
    """Whether ranks are full with `batch` rows each, so that fewer ready ones are not worth a look."""

    def __init__(self, table: Table, task: Task, sampler: Any) -> None:
        super().__init__(table, task)
        self.sampler = sampler
        self.lanes: dict[Any, list[tuple[int, int, int]]] = {}  # heaps of (place in the order, first row, rows)

    def stand(self, entry: Entry, rows: range) -> Iterable[tuple[Any, int]]:
        """(lane, place in the order) of each row."""
        return [(None, 0)] * len(rows)

    def open(self, ask: Ask) -> list[Any]:
        """The lanes that may be taken from, first ones first."""
        return list(self.lanes)

    def allows(self, place: int, ask: Ask) -> bool:
        """Whether the row at this place may be taken, now that those before it are."""
        return True

    def deal(self, runs: Runs, ask: Ask) -> Picked | None:
        """Rows for each rank; None when these are not enough."""
        total, want = count(runs), ask.ranks * ask.batch
        if not total or (total < want and not ask.partial):
            return None
        return self.parts(runs, [ask.batch] * ask.ranks if total == want else even(total, ask.ranks))

    def parts(self, runs: Runs, sizes: list[int]) -> Picked:
        return cut(runs, sizes)

    def admit(self, entry: Entry, rows: range) -> None:
        for (lane, place), alike in groupby(zip(self.stand(entry, rows), rows, strict=True), key=lambda item: item[0]):
            places = [i for _, i in alike]
            item = (place, row_id(entry.num, places[0]), len(places))
            heapq.heappush(self.lanes.setdefault(lane, []), item)

    def choose(self, ask: Ask) -> Picked | None:
        least = ask.ranks * ask.batch if self.counts_rows and not ask.partial else 1
        if self.task.counts[READY] < least:
            return None
        runs = self._take(ask)
        picked = self.deal(runs, ask)
        self.fresh += runs if picked is None else []
        return picked

    def _take(self, ask: Ask) -> Runs:
        """The first ready rows, as many as are wanted; they are out of the queue."""
        taken: Runs = []
        want = ask.ranks * ask.batch
        for lane in self.open(ask):
            heap = self.lanes[lane]
            while heap and want:
                place, start, length = heap[0]
                ready = self.ready(start, length)
                if ready and not self.allows(place, ask):
                    break
                heapq.heappop(heap)
                for first, rows in ready:
                    part = min(rows, want)
                    want -= part
                    taken += [[first, part]] if part else []
                    if part < rows:
                        heapq.heappush(heap, (place, first + part, rows - part))
            if not heap:
                del self.lanes[lane]
        return taken


class EvenQueue(Queue):
    """Dealt so that the tokens of ranks are about equal."""

    sampler: Balanced

    def parts(self, runs: Runs, sizes: list[int]) -> Picked:
        ids = list(expand(runs))
        parts = balanced(costs(self.table, runs), len(sizes), equal_size=self.sampler.equal_size)
        return [compress([ids[i] for i in part]) for part in parts]


class BudgetQueue(Queue):
    """Dealt up to a budget of tokens; what is over goes back."""

    sampler: TokenBudget
    counts_rows = False

    def deal(self, runs: Runs, ask: Ask) -> Picked | None:
        ids, cost = list(expand(runs)), costs(self.table, runs)
        parts: list[list[int]] = []
        at, full = 0, True
        for _ in range(ask.ranks):
            first, total = at, 0
            while at < len(ids) and at - first < ask.batch:
                if at > first and total + cost[at] > self.sampler.tokens:
                    break
                total, at = total + cost[at], at + 1
            full = full and (at < len(ids) or at - first == ask.batch or total >= self.sampler.tokens)
            parts.append(ids[first:at])
        if not full and not ask.partial:
            return None
        self.fresh += compress(ids[at:])
        return [compress(part) for part in parts]


class WindowQueue(Queue):
    sampler: VersionWindow

    def stand(self, entry: Entry, rows: range) -> Iterable[tuple[Any, int]]:
        return [(version, 0) for version in entry.values("versions", rows)]

    def open(self, ask: Ask) -> list[Any]:
        """Versions in the window, oldest first. Rows without a version are inside only where there are no bounds."""
        s = self.sampler
        low = -1 if s.min_version is None else s.min_version
        if s.max_staleness is not None:
            low = max(low, ask.version - s.max_staleness)
        inside = [v for v in self.lanes if v is not None and v >= low and (s.max_version is None or v <= s.max_version)]
        bounded = (s.min_version, s.max_version, s.max_staleness) != (None, None, None)
        return [*([] if bounded or None not in self.lanes else [None]), *sorted(inside)]


class OrderedQueue(Queue):
    """`mark` is the first place that nobody has come to in this pass."""

    sampler: Ordered

    def __init__(self, table: Table, task: Task, sampler: Ordered) -> None:
        super().__init__(table, task, sampler)
        self._reached = 0
        if sampler.window is not None:  # rows that were read before a restore do not hold up those behind them
            read = {place for entry, rows in table.parts(task.runs(DONE)) for _, place in self.stand(entry, rows)}
            while (place := self._behind_cleared(self.mark)) in read:
                self.mark = place + 1

    def stand(self, entry: Entry, rows: range) -> Iterable[tuple[Any, int]]:
        return [(None, self._place(key)) for key in entry.values("keys", rows)]

    def choose(self, ask: Ask) -> Picked | None:
        if self.sampler.window is None and not ask.ended:
            return None
        self._reached = self._behind_cleared(self.mark)
        picked = super().choose(ask)
        if picked is not None:
            self.mark = self._reached
        return picked

    def allows(self, place: int, ask: Ask) -> bool:
        if self.sampler.window is None:
            return True
        if place > self._reached and not ask.ended:
            return False
        self._reached = self._behind_cleared(max(self._reached, place + 1))
        return True

    def _behind_cleared(self, mark: int) -> int:
        """The first place from `mark` on whose row was not cleared: nobody waits for one that was, met before or not."""
        size = self.sampler.window
        while size is not None:
            window, at = divmod(mark, size)
            if window * size + _unshuffled(self.sampler.seed, window, size)[at] not in self.table.cleared:
                break
            mark += 1
        return mark

    def _place(self, key: str | None) -> int:
        seed, size = self.sampler.seed, self.sampler.window
        if key is None:
            raise SamplerFailed("rows in a fixed order must have keys, got rows without. Put them with keys=.")
        if size is None:
            return int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest(), "big")
        number = number_of(key)
        if number is None:
            raise SamplerFailed(
                f"keys of rows in shuffled windows must be numbers below 10**18, got {key[:40]!r}. Use window=None."
            )
        window, place = divmod(number, size)
        return window * size + _shuffled(seed, window, size)[place]


class GroupsChooser(Chooser):
    """A group's rows are gathered until there are enough; a further row begins the group's next set."""

    def __init__(self, table: Table, task: Task, sampler: Groups) -> None:
        super().__init__(table, task)
        self._size = sampler.rows_per_group
        self._gathered: dict[Any, list[int]] = {}  # fewer than a whole set each
        self._whole: list[tuple[list[int], Any]] = []  # (rows in order, group), by their first row

    def admit(self, entry: Entry, rows: range) -> None:
        for i, group in zip(rows, entry.values("groups", rows), strict=True):
            id = row_id(entry.num, i)
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
        taken: list[tuple[list[int], Any]] = []
        while self._whole and len(taken) < want and (ask.partial or len(taken) + len(self._whole) >= want):
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
        runs = compress([id for rows, _ in taken for id in rows])
        return cut(runs, [size * self._size for size in sizes])


def balanced(costs: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of `costs` in `parts` parts whose sums are about equal, each ascending: the costliest first, each to the part that
    has least. `equal_size`: so many at a time as there are parts, so that their lengths differ by at most one."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    found: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    together = parts if equal_size else 1
    for at in range(0, len(order), together):
        least = sorted(range(parts), key=lambda part: (sums[part], len(found[part])))
        for i, part in zip(order[at : at + together], least, strict=False):
            found[part].append(i)
            sums[part] += costs[i]
    return [sorted(indices) for indices in found]


def costs(table: Table, runs: Runs) -> list[int]:
    """Tokens of each row, 1 where nobody said."""
    return [cost for entry, rows in table.parts(runs) for cost in entry.values("tokens", rows)]


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


_CHOOSERS: Mapping[str, Callable[[Table, Task, Any], Chooser]] = {
    "sequential": Queue,
    "balanced": EvenQueue,
    "token_budget": BudgetQueue,
    "version_window": WindowQueue,
    "groups": GroupsChooser,
    "ordered": OrderedQueue,
    "own": OwnChooser,
}


def chooser(table: Table, task: Task) -> Chooser:
    """The chooser of a task's sampler, with every row that is ready now."""
    sampler = load_sampler(task.sampler)
    return _CHOOSERS[sampler.kind](table, task, sampler)
