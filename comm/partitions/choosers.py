"""What all samplers have in common: they are told which rows became ready, and asked which come next, and for which rank.

Owns the question and the base of those that answer it (`samplers.py`, `own.py`). Changes no state: what is picked becomes a claim
event, and only that moves rows. A chooser is derived from the task's states and made anew after a restart. Rows leave it when
they are picked; those that are cleared stay in its containers until they are met, so every row is looked at again when it is
taken.

    add(run)     these rows became ready (again)
    pick(ask)    rows for every rank, as runs; None when there are not enough yet

Invariant: `pick` costs as much as it takes (times the logarithm of what is held), and returns only rows that are ready, each
once; a pick that returns None leaves them all where they were.
"""

from __future__ import annotations

from dataclasses import dataclass

from rondo.comm.partitions.entry import Entry
from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, compress
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import READY, Runs, Task

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
    """Fresh rows wait here until somebody asks. Subclasses take them in and choose."""

    def __init__(self, table: Table, task: Task) -> None:
        self.table, self.task = table, task
        self.fresh = list(task.runs(READY))
        self.mark = task.mark

    def add(self, start: int, length: int) -> None:
        self.fresh.append([start, length])

    def pick(self, ask: Ask) -> Picked | None:
        fresh, self.fresh = self.fresh, []
        for entry, rows in self.table.parts(fresh):
            self.admit(entry, rows)
        return self.choose(ask)

    def admit(self, entry: Entry, rows: range) -> None:
        raise NotImplementedError

    def choose(self, ask: Ask) -> Picked | None:
        raise NotImplementedError

    def is_ready(self, id: int) -> bool:
        return self.task.state(id >> ROW_BITS, id & ROW_MASK) == READY

    def ready(self, start: int, length: int) -> Runs:
        """Those of a run that are ready."""
        first = start & ROW_MASK
        states = self.task.states.get(start >> ROW_BITS, b"")[first : first + length]
        if states.count(READY) == length:
            return [[start, length]]
        return compress([start + i for i, state in enumerate(states) if state == READY])
