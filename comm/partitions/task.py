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

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from rondo.comm.partitions.entry import Entry, digits, flags
from rondo.comm.partitions.runs import compress, row_id

WAITING, READY, CLAIMED, DONE, GONE = range(5)
_AGAIN = bytes.maketrans(bytes([DONE]), bytes([READY]))
_NEW = bytes.maketrans(bytes([0, 1]), bytes([GONE, WAITING]))

Runs = list[list[int]]


@dataclass(slots=True)
class Claim:
    """Batch `index` of a scope: rows of every rank as runs, and who of the rank's peers has acknowledged."""

    rows: list[Runs]
    peers: int
    of_pass: int
    acked: list[list[int]]

    def held(self) -> list[Runs]:
        """Rows of every rank that has not acknowledged."""
        return [rows for rows, acked in zip(self.rows, self.acked, strict=True) if len(acked) < self.peers]


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
        self.counts = [0, 0, 0, 0, 0]  # rows by state; those gone mean nothing
        self.num_acked = 0  # rows acknowledged, ever
        self.num_returned = 0  # rows that came back from a dead reader, ever
        self.mark = 0  # how far an order of its own has come in this pass (`samplers.Ordered`)
        self.claims: dict[tuple[str, int], Claim] = {}
        self.scopes: dict[str, Scope] = {}
        self.chooser: Any = (
            None  # of its sampler (`choosers.Chooser`): derived from the states, made anew when it is missing
        )
        self.news = False  # rows became ready since waiting readers were looked at

    def admit(self, entry: Entry) -> None:
        """A new record, or one that was there before the task."""
        self.states[entry.num] = entry.live.translate(_NEW)
        self.counts[WAITING] += sum(entry.live)
        self.complete(entry, range(entry.n))
        for first, length in entry.done.get(self.name, ()):
            self.move(entry.num, range(first, first + length), (READY,), DONE)

    def complete(self, entry: Entry, rows: Sequence[int]) -> None:
        """Columns of these rows came."""
        self.move(entry.num, entry.having(self.columns, rows), (WAITING,), READY)

    def move(self, record: int, rows: Sequence[int], old: tuple[int, ...], new: int) -> None:
        """Those of a record's rows that are in one of the old states take another one."""
        states, counts = self.states[record], self.counts
        moved = [i for i in rows if states[i] in old]
        for i in moved:
            counts[states[i]] -= 1
            states[i] = new
        counts[new] += len(moved)
        if new == READY and moved:
            self.news = True
            if self.chooser is not None:
                for start, length in compress([row_id(record, i) for i in moved]):
                    self.chooser.add(start, length)

    def state(self, record: int, i: int) -> int:
        states = self.states.get(record, b"")
        return states[i] if i < len(states) else GONE

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

    def runs(self, wanted: int) -> Iterator[list[int]]:
        """Every row in this state, record by record."""
        for num, states in self.states.items():
            yield from compress([row_id(num, i) for i, state in enumerate(states) if state == wanted])

    def scope(self, name: str, member: str) -> Scope:
        """The scope of this name, from now on if it is new."""
        return self.scopes.setdefault(name, Scope(member, self.num_passes))

    def dump(self) -> dict[str, Any]:
        return {
            "name": self.name, "columns": self.columns, "sampler": self.sampler, "num_passes": self.num_passes,
            "states": [[num, digits(states)] for num, states in self.states.items()],
            "num_acked": self.num_acked, "num_returned": self.num_returned, "mark": self.mark,
            "claims": [[*at, *list(astuple(claim))] for at, claim in self.claims.items()],
            "scopes": [[name, *list(astuple(scope))] for name, scope in self.scopes.items()],
        }  # fmt: skip

    @classmethod
    def load(cls, state: dict[str, Any]) -> Task:
        task = cls(state["name"], state["columns"], state["sampler"])
        for name in ("num_passes", "num_acked", "num_returned", "mark"):
            setattr(task, name, state[name])
        task.states = {num: flags(text) for num, text in state["states"]}
        task.counts = [sum(states.count(kind) for states in task.states.values()) for kind in range(5)]
        task.claims = {(scope, k): Claim(*fields) for scope, k, *fields in state["claims"]}
        task.scopes = {name: Scope(*fields) for name, *fields in state["scopes"]}
        return task
