"""A user's own sampler: a class named by its import path, run inside the coordinator, believed in nothing.

Owns the contract and its checks. The class is made with the settings of `spec.Own` and has two methods:

    class Longest:
        def __init__(self, **settings): ...
        def add(self, rows: list[Facts]) -> None: ...              # these rows became ready (again)
        def pick(self, ask: Ask) -> list[list[int]] | None: ...    # row ids for each rank; None: not enough yet

Rows that were picked or cleared are not taken back: `pick` may be asked again for what it returned when a reader died, after
another `add`. It must return at most `ask.batch` ids for each of `ask.ranks` ranks, all ready, none twice.

Invariant: whatever the class does short of never returning, its caller gets `SamplerFailed` and the coordinator goes on. A
sampler that failed is made anew, with all ready rows, when somebody asks again.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from rondo.comm.partitions.choosers import Ask, Chooser, Picked
from rondo.comm.partitions.entry import Entry
from rondo.comm.partitions.runs import compress, row_id
from rondo.comm.partitions.spec import Own
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import Task
from rondo.runtime.errors import SamplerFailed


class Facts(NamedTuple):
    """What a sampler may know of a row."""

    id: int
    key: str | None
    group: int | str | None
    tokens: int
    version: int | None
    tags: dict[str, Any]


_SAID = ("keys", "groups", "tokens", "versions", "tags")  # as `Facts` has them


class OwnChooser(Chooser):
    def __init__(self, table: Table, task: Task, sampler: Own) -> None:
        super().__init__(table, task)
        self._path = sampler.path
        self._untold: list[Facts] = []
        module, _, name = sampler.path.partition(":")
        try:
            self._own: Any = getattr(import_module(module), name)(**sampler.settings)
        except Exception as error:  # a user's module may raise anything
            raise self._failed("must be importable and take its settings", error) from error

    def admit(self, entry: Entry, rows: range) -> None:
        for id, *said in zip(
            (row_id(entry.num, i) for i in rows), *(entry.values(name, rows) for name in _SAID), strict=True
        ):
            if self.is_ready(id):
                self._untold.append(Facts(id, *said))

    def choose(self, ask: Ask) -> Picked | None:
        untold, self._untold = self._untold, []
        try:
            if untold:
                self._own.add(untold)
            picked = self._own.pick(ask)
        except Exception as error:  # a user's sampler may raise anything; its caller is told
            raise self._failed("must not raise", error) from error
        return None if picked is None else self._checked(picked, ask)

    def _checked(self, picked: Any, ask: Ask) -> Picked | None:
        if not isinstance(picked, list) or len(picked) != ask.ranks or not all(isinstance(p, list) for p in picked):
            raise self._failed(f"must return a list of row ids for each of {ask.ranks} ranks", repr(picked)[:200])
        ids = [id for part in picked for id in part]
        longest = max(map(len, picked))
        if longest > ask.batch:
            raise self._failed(f"must return at most {ask.batch} rows a rank", longest)
        wrong = [id for id in ids if type(id) is not int or not self.is_ready(id)]
        if wrong:
            raise self._failed("must return ready rows", repr(wrong)[:200])
        if len(set(ids)) != len(ids):
            raise self._failed("must return no row twice", f"{len(ids) - len(set(ids))} repeated")
        return [compress(part) for part in picked] if ids else None

    def _failed(self, rule: str, found: object) -> SamplerFailed:
        text = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else str(found)
        return SamplerFailed(f"sampler {self._path} of task {self.task.name} {rule}, got {text}. Correct the class.")
