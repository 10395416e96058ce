"""A task: one consumer of a partition, and what it has read of it.

Owns the state of every row for this task, its claims, and the counters. Independent of every other task: two of them read
the same rows without knowing of each other. Which ready rows are claimed next is the sampler's (`samplers.py`).

    waiting --all columns there--> ready --claim--> claimed --acknowledged--> done
                                     ^                 |                       |
                                     `---dead reader---'<------- reset --------'

A scope is one incarnation of a role group that reads: its ranks ask for batch 0, 1, 2, ... and batch k is planned for all of
them at once, so every peer of a rank gets the same rows for the same index. A scope ends with its incarnation.

Invariants: the counters equal the states at every moment; a row that was claimed is done or ready again, never lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from rondo.comm.partitions.entry import LIVE, Entry, digits, flags, places_of
from rondo.comm.partitions.runs import Run, row_id

WAITING, READY, CLAIMED, DONE, GONE = range(5)
_FILL = [bytes([state]) for state in range(5)]
_AGAIN = bytes.maketrans(_FILL[DONE], _FILL[READY])


class Chooser(Protocol):
    """What a task tells its sampler, and is told; derived from the states, made anew when it is missing."""

    mark: int

    def add(self, start: int, length: int) -> None: ...
    def pick(self, ask: Any) -> list[list[list[int]]] | None: ...


@dataclass(slots=True)
class Claim:
    """Batch `index` of a scope: rows of every rank as runs, and who of the rank's peers has acknowledged."""

    rows: list[list[list[int]]]
    peers: int
    of_pass: int
    acked: list[list[int]]


@dataclass(slots=True)
class Scope:
    """One incarnation that reads, since pass `first_pass`. `next` is the batch to plan next; its stream ended at `stops`."""

    member: str
    first_pass: int
    next: int = 0
    stops: list[int] = field(default_factory=list)


class Task:
    def __init__(self, name: str, columns: list[str], sampler: dict[str, Any]) -> None:
        self.name = name
        self.columns = list(columns)
        self.sampler = sampler
        self.num_passes = 0  # resets so far
        self.states: dict[int, bytearray] = {}
        self.counts = [0, 0, 0, 0, 0]  # rows by state; those gone are not counted
        self.num_acked = 0  # rows acknowledged, ever
        self.num_returned = 0  # rows that came back from a dead reader, ever
        self.mark = 0  # how far an order of its own has come in this pass (`samplers.Ordered`)
        self.claims: dict[tuple[str, int], Claim] = {}
        self.scopes: dict[str, Scope] = {}
        self.chooser: Chooser | None = None
        self.news = False  # rows became ready since waiting readers were looked at

    @property
    def num_ready(self) -> int:
        return self.counts[READY]

    def admit(self, entry: Entry) -> None:
        """A new record, or one that was there before the task."""
        n = entry.n
        if all(entry.whole(name) for name in self.columns):
            states = bytearray(_FILL[READY] * n)
        else:
            states = bytearray(n)
            for i in range(n):
                states[i] = READY if self._complete(entry, i) else WAITING
        if entry.num_live < n:
            for i, live in enumerate(entry.live):
                if live != LIVE:
                    states[i] = GONE
        for first, length in entry.done.get(self.name, ()):
            for i in range(first, first + length):
                if states[i] == READY:
                    states[i] = DONE
        self.states[entry.num] = states
        for state in range(GONE):
            self.counts[state] += states.count(state)
        self._announce(entry.num, states, 0, n)

    def complete(self, entry: Entry, places: range | list[int]) -> None:
        """Columns were added to these rows."""
        states = self.states[entry.num]
        if all(entry.whole(name) for name in self.columns):
            ready = [i for i in places if states[i] == WAITING]
        else:
            ready = [i for i in places if states[i] == WAITING and self._complete(entry, i)]
        if not ready:
            return
        for i in ready:
            states[i] = READY
        self.counts[WAITING] -= len(ready)
        self.counts[READY] += len(ready)
        if ready[-1] - ready[0] == len(ready) - 1:
            self._tell(row_id(entry.num, ready[0]), len(ready))
        else:
            for i in ready:
                self._tell(row_id(entry.num, i), 1)

    def move(self, run: Run, new: int) -> None:
        """Rows of a run take another state, whatever theirs is; those gone stay so."""
        record, first, end = places_of(run[0], run[1])
        states = self.states[record]
        part = states[first:end]
        counts = self.counts
        for state in range(GONE):
            counts[state] -= part.count(state)
        num_gone = part.count(GONE)
        if new != GONE:
            counts[new] += end - first - num_gone
        if num_gone:
            states[first:end] = bytes(GONE if state == GONE else new for state in part)
        else:
            states[first:end] = _FILL[new] * (end - first)
        if new == READY:
            self._tell(run[0], run[1])

    def state(self, id: int) -> int:
        record, i, _ = places_of(id, 1)
        states = self.states.get(record)
        return states[i] if states is not None and i < len(states) else GONE

    def forget(self, num: int) -> None:
        """Nothing of a record is left."""
        self.states.pop(num, None)

    def again(self, number: int) -> None:
        """Pass `number` begins: what was done is ready again."""
        self.num_passes = number
        self.mark = 0
        for num, states in self.states.items():
            self.states[num] = states.translate(_AGAIN)
        self.counts[READY] += self.counts[DONE]
        self.counts[DONE] = 0
        self.chooser, self.news = None, True

    def may_come_back(self, scope: str) -> bool:
        """Whether rows are held that could still become ready: by another scope, or read for a pass before this one."""
        return any(holder != scope or c.of_pass != self.num_passes for (holder, _), c in self.claims.items())

    def ready_runs(self) -> Iterator[tuple[int, int]]:
        """Every ready row, record by record: what a new chooser begins with."""
        for num, states in self.states.items():
            yield from _runs(num, states, 0, len(states), READY)

    def scope(self, name: str, member: str) -> Scope:
        """The scope of this name, from now on if it is new."""
        return self.scopes.setdefault(name, Scope(member, self.num_passes))

    def done_runs(self) -> list[tuple[int, int]]:
        """Every row that was read, record by record."""
        return [run for num, states in self.states.items() for run in _runs(num, states, 0, len(states), DONE)]

    def _complete(self, entry: Entry, i: int) -> bool:
        return all(entry.place(name, i) >= 0 for name in self.columns)

    def _announce(self, num: int, states: bytearray, first: int, end: int) -> None:
        if self.chooser is not None:
            for start, length in _runs(num, states, first, end, READY):
                self.chooser.add(start, length)
        self.news = True

    def _tell(self, start: int, length: int) -> None:
        if self.chooser is not None:
            self.chooser.add(start, length)
        self.news = True

    def dump(self) -> dict[str, Any]:
        return {
            "name": self.name, "columns": self.columns, "sampler": self.sampler, "num_passes": self.num_passes,
            "states": [[num, digits(states)] for num, states in self.states.items()],
            "num_acked": self.num_acked, "num_returned": self.num_returned, "mark": self.mark,
            "claims": [[scope, k, c.rows, c.peers, c.of_pass, c.acked] for (scope, k), c in self.claims.items()],
            "scopes": [[name, s.member, s.first_pass, s.next, list(s.stops)] for name, s in self.scopes.items()],
        }  # fmt: skip

    @classmethod
    def load(cls, state: dict[str, Any]) -> Task:
        task = cls(state["name"], state["columns"], state["sampler"])
        task.num_passes, task.num_acked, task.num_returned = (
            state["num_passes"], state["num_acked"], state["num_returned"],
        )  # fmt: skip
        task.mark = state["mark"]
        for num, text in state["states"]:
            task.states[num] = states = flags(text)
            for kind in range(GONE):
                task.counts[kind] += states.count(kind)
        for scope, k, *fields in state["claims"]:
            task.claims[scope, k] = Claim(*fields)
        task.scopes = {name: Scope(*fields) for name, *fields in state["scopes"]}
        return task


def _runs(num: int, states: bytearray, first: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Rows of a record in this state as (first row id, rows)."""
    at = states.find(wanted, first, end)
    while at >= 0:
        stop = at
        while stop < end and states[stop] == wanted:
            stop += 1
        yield row_id(num, at), stop - at
        at = states.find(wanted, stop, end)
