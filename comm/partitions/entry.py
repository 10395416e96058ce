"""The rows that came with one record: where every column of each lies, and what was said about them.

Owns the compact form of that. Most records are put whole and get every further column whole, so a column is one number, the
record that holds it; only where rows got it apart does it become a list.

    columns {"tokens": 7, "ref": 9, "score": [row id, -1, ...]}
             the record's own | record 9, row by row the same place | one place a row, -1 where there is none yet

Invariant: once a row has a column it keeps it until the row is cleared.
"""

from __future__ import annotations

from typing import Any

from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, row_id

DEAD, LIVE, HELD = 0, 1, 2
"""A row that is cleared (or never came to be), one that is there, one that is cleared while somebody still reads it."""
_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")
_FLAGS = bytes.maketrans(b"0123456789", bytes(range(10)))


def digits(flags: bytearray) -> str:
    """Small numbers as text, one character each."""
    return flags.translate(_DIGITS).decode("ascii")


def flags(text: str) -> bytearray:
    return bytearray(text.encode("ascii").translate(_FLAGS))


class Entry:
    """`groups`, `versions` and `tags` are one value for all rows, or a list with one a row; `tokens` and `keys` are lists."""

    __slots__ = (
        "change", "columns", "done", "groups", "keys", "live", "n", "num", "num_held", "num_live", "tags", "tokens",
        "versions",
    )  # fmt: skip

    def __init__(self, num: int, n: int, columns: list[str], live: bytearray) -> None:
        self.num = num
        self.n = n
        self.columns: dict[str, int | list[int]] = dict.fromkeys(columns, num)
        self.live = live
        self.num_live = live.count(LIVE)
        self.num_held = 0
        self.keys: list[str] | None = None
        self.groups: Any = None
        self.versions: int | list[int] | None = None
        self.tokens: list[int] | None = None
        self.tags: Any = None
        self.done: dict[str, list[list[int]]] = {}  # task -> [first place, rows] that it had read before a restore
        self.change: int | list[int] = 0

    def place(self, name: str, i: int) -> int:
        """Row id, in the record that holds it, of this column's value for row `i`; -1 without one."""
        column = self.columns.get(name, -1)
        if isinstance(column, int):
            return column if column < 0 else row_id(column, i)
        return column[i]

    def whole(self, name: str) -> bool:
        """Whether every row has the column, each at its own place in one record."""
        return isinstance(self.columns.get(name), int)

    def put_whole(self, name: str, source: int) -> bool:
        """Give a column to all rows at once; False when some have it."""
        if name in self.columns:
            return False
        self.columns[name] = source
        return True

    def put(self, name: str, i: int, place: int) -> bool:
        """Give a column to one row; False when it has it."""
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = [-1] * self.n
        if isinstance(column, int) or column[i] >= 0:
            return False
        column[i] = place
        return True

    def sources(self, i: int) -> set[int]:
        """The records that row `i` has values in."""
        return {
            column if isinstance(column, int) else column[i] >> ROW_BITS
            for column in self.columns.values()
            if isinstance(column, int) or column[i] >= 0
        }

    def common_sources(self) -> set[int] | None:
        """The records of every row, where they are the same for all."""
        values = self.columns.values()
        if all(type(value) is int for value in values):
            return set(values)  # type: ignore[arg-type]  # all are numbers
        return None

    def key(self, i: int) -> str | None:
        return None if self.keys is None else self.keys[i]

    def group(self, i: int) -> int | str | None:
        return self.groups[i] if isinstance(self.groups, list) else self.groups

    def version(self, i: int) -> int | None:
        return self.versions[i] if isinstance(self.versions, list) else self.versions

    def cost(self, i: int) -> int:
        """Tokens of a row, 1 where nobody said."""
        return 1 if self.tokens is None else self.tokens[i]

    def tag(self, i: int) -> dict[str, Any]:
        return (self.tags[i] if isinstance(self.tags, list) else self.tags) or {}

    def changed(self, i: int) -> int:
        return self.change[i] if isinstance(self.change, list) else self.change

    def mark(self, number: int, places: list[int] | None = None) -> None:
        """Note a change of these rows, or of all."""
        if places is None or len(places) == self.n:
            self.change = number
            return
        if isinstance(self.change, int):
            self.change = [self.change] * self.n
        for i in places:
            self.change[i] = number

    def dump(self) -> list[Any]:
        return [
            self.num, self.n, {name: list(c) if isinstance(c, list) else c for name, c in self.columns.items()},
            digits(self.live), self.keys, self.groups, self.versions, self.tokens, self.tags, self.done,
            list(self.change) if isinstance(self.change, list) else self.change,
        ]  # fmt: skip

    @classmethod
    def load(cls, state: list[Any]) -> Entry:
        num, n, columns, live, keys, groups, versions, tokens, tags, done, change = state
        entry = cls(num, n, [], flags(live))
        entry.columns = {name: list(c) if isinstance(c, list) else c for name, c in columns.items()}
        entry.num_held = entry.live.count(HELD)
        entry.keys, entry.groups, entry.versions, entry.tokens, entry.tags = keys, groups, versions, tokens, tags
        entry.done, entry.change = done, list(change) if isinstance(change, list) else change
        return entry


def places_of(start: int, length: int) -> tuple[int, int, int]:
    """(record, first place, end place) of a run."""
    i = start & ROW_MASK
    return start >> ROW_BITS, i, i + length
