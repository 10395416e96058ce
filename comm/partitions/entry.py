"""The rows that came with one record: where every column of each lies, and what was said about them.

Owns the compact form of that. A column is one place a row: the row id that its value has in the record that holds it, -1 where
there is none yet. Columns that came with the record share one array.

    columns {"tokens": [7/0, 7/1, 7/2], "log_probs": the same, "score": [9/1, -1, 9/0]}

Invariant: once a row has a column it keeps it until the row is cleared.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, row_id

SAID = ("keys", "groups", "versions", "tokens", "tags")
"""What a put may say of its rows: one value for all (never of keys and tokens), or a list with one a row."""
_UNSAID: Mapping[str, Any] = {"tokens": 1, "tags": {}}
_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")
_FLAGS = bytes.maketrans(b"0123456789", bytes(range(10)))


def digits(flags: bytearray) -> str:
    """Small numbers as text, one character each."""
    return flags.translate(_DIGITS).decode("ascii")


def flags(text: str) -> bytearray:
    return bytearray(text.encode("ascii").translate(_FLAGS))


class Entry:
    """`live`: whether a row is there. `uses`: who needs its memory, itself while it is there and every claim that holds it.
    `done`: what tasks had read before a restore, {task: [[first place, rows], ...]}."""

    __slots__ = ("change", "columns", "done", "live", "n", "num", "num_used", "own", "said", "uses")

    def __init__(self, num: int, columns: Iterable[str], live: bytearray, said: Mapping[str, Any]) -> None:
        self.num, self.n = num, len(live)
        self.live, self.uses, self.num_used = live, bytearray(live), sum(live)
        self.own = array("q", range(row_id(num, 0), row_id(num, 0) + self.n))
        self.columns = dict.fromkeys(columns, self.own)
        self.said = {name: said[name] for name in SAID if said.get(name) is not None}
        self.done: dict[str, list[list[int]]] = said.get("done") or {}
        self.change = array("q", bytes(8 * self.n))

    def whole(self, names: Iterable[str]) -> bool:
        """Whether these columns came with the rows."""
        return all(self.columns.get(name) is self.own for name in names)

    def having(self, names: Iterable[str], rows: Sequence[int]) -> Sequence[int]:
        """Those of these rows that have all these columns."""
        for name in names:
            column = self.columns.get(name)
            if column is None:
                return []
            if column is not self.own:
                rows = [i for i in rows if column[i] >= 0]
        return rows

    def give(self, name: str, rows: Sequence[int], places: Sequence[int]) -> Sequence[int]:
        """A column for those of these rows that have it not: which they were."""
        column = self.columns.get(name)
        if column is None and len(rows) == self.n and rows == list(range(self.n)):
            self.columns[name] = array("q", places)
            return rows
        if column is None:
            column = self.columns[name] = array("q", [-1]) * self.n
        given = []
        for i, place in zip(rows, places, strict=True):
            if column[i] < 0:
                column[i] = place
                given.append(i)
        return given

    def places(self, name: str, rows: range) -> Sequence[int]:
        """Where a column of neighbouring rows lies."""
        column = self.columns.get(name)
        return [-1] * len(rows) if column is None else column[rows.start : rows.stop]

    def records(self, rows: Sequence[int]) -> Counter[int]:
        """The records that these rows have values in, and how many rows have."""
        if self.whole(self.columns):
            return Counter({self.num: len(rows)})
        columns = {id(column): column for column in self.columns.values()}.values()
        cells = zip(*[[column[i] >> ROW_BITS for i in rows] for column in columns], strict=True)
        found = Counter(record for row in cells for record in set(row))
        del found[-1]  # cells without a value
        return found

    def values(self, name: str, rows: range) -> list[Any]:
        """What was said of neighbouring rows."""
        value = self.said.get(name)
        found = value[rows.start : rows.stop] if isinstance(value, list) else [value] * len(rows)
        return [_UNSAID.get(name) if value is None else value for value in found]

    def value(self, name: str, i: int) -> Any:
        return self.values(name, range(i, i + 1))[0]

    def dump(self) -> list[Any]:
        columns = {name: self._short(column) for name, column in self.columns.items()}
        said = [self.said.get(name) for name in SAID]
        same = self.change.count(self.change[0]) == self.n
        return [
            self.num, self.n, columns, digits(self.live), *said, self.done, self.change[0] if same else list(self.change)
        ]  # fmt: skip

    def _short(self, column: array[int]) -> int | list[int]:
        """The record that holds all rows at their own places, or one place a row."""
        start = column[0] & ~ROW_MASK
        whole = column is self.own or column == array("q", range(start, start + self.n))
        return column[0] >> ROW_BITS if whole else list(column)

    @classmethod
    def load(cls, state: list[Any]) -> Entry:
        num, n, columns, live, *said, done, change = state
        entry = cls(num, [], bytearray(flag == 1 for flag in flags(live)), dict(zip(SAID, said, strict=True)))
        entry.done, entry.change = done, array("q", change if isinstance(change, list) else [change] * n)
        for name, at in columns.items():
            places = at if isinstance(at, list) else range(row_id(at, 0), row_id(at, 0) + n)
            entry.columns[name] = entry.own if at == num else array("q", places)
        return entry
