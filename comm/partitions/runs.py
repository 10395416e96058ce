"""Row ids, and ranges of them.

Owns the form of a row id and of a run. A row id is (record number, place in the record) in one integer, so neighbours in a
record are neighbours in number and a claim of whole records is a few pairs, however many rows it has. Knows nothing else.

    record 5, rows 0 to 63        ids 5 << 20 ... (5 << 20) + 63
    a run                         [5 << 20, 64]
    compress([8, 9, 10, 12])      [[8, 3], [12, 1]]

Invariant: a run never leaves its record.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

ROW_BITS = 20
MAX_ROWS = 1 << ROW_BITS
"""Most rows of one record."""
ROW_MASK = MAX_ROWS - 1
_DIGITS = 18

Run = Sequence[int]  # [first row id, number of rows]


def row_id(record: int, place: int) -> int:
    return record << ROW_BITS | place


def count(runs: Iterable[Run]) -> int:
    """Rows of these runs together."""
    return sum(run[1] for run in runs)


def expand(runs: Iterable[Run]) -> Iterator[int]:
    """Every row id, in order."""
    for start, length in runs:
        yield from range(start, start + length)


def compress(ids: Iterable[int]) -> list[list[int]]:
    """The same ids in the same order as runs; neighbours become one."""
    runs: list[list[int]] = []
    ids = list(ids)
    if ids and ids[-1] >> ROW_BITS == ids[0] >> ROW_BITS and ids == list(range(ids[0], ids[-1] + 1)):
        return [[ids[0], len(ids)]]  # as most are
    for id in ids:
        if runs and id == runs[-1][0] + runs[-1][1] and id & ROW_MASK:
            runs[-1][1] += 1
        else:
            runs.append([id, 1])
    return runs


def cut(runs: Sequence[Run], sizes: Iterable[int]) -> list[list[list[int]]]:
    """Parts of `sizes` rows each, in order; the last ones are short, or empty, where the runs end."""
    parts: list[list[list[int]]] = []
    at, offset = 0, 0
    for size in sizes:
        part: list[list[int]] = []
        while size and at < len(runs):
            start, length = runs[at]
            taken = min(size, length - offset)
            part.append([start + offset, taken])
            size, offset = size - taken, offset + taken
            if offset == length:
                at, offset = at + 1, 0
        parts.append(part)
    return parts


def even(total: int, parts: int) -> list[int]:
    """Sizes that differ by at most one: the first ones are the larger."""
    return [(total + parts - 1 - part) // parts for part in range(parts)]


def number_of(key: str) -> int | None:
    """The number that a row's key is, where it is one that an order can have: below 10**18, which JSON and a word hold."""
    return int(key) if len(key) <= _DIGITS and key.isdecimal() else None


class Numbers:
    """A set of whole numbers that mostly follow each other, as the edges of its runs in order: as small as it has gaps."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._edges = [edge for start, length in runs for edge in (start, start + length)]

    def __contains__(self, number: int) -> bool:
        return bisect_right(self._edges, number) % 2 == 1

    def add(self, number: int) -> None:
        for edge in (number, number + 1) if number not in self else ():
            at = bisect_left(self._edges, edge)
            if self._edges[at : at + 1] == [edge]:  # a run begins or ends here: now it goes on
                del self._edges[at]
            else:
                self._edges.insert(at, edge)

    def runs(self) -> list[list[int]]:
        """[first number, how many], in order."""
        return [[start, end - start] for start, end in zip(self._edges[::2], self._edges[1::2], strict=True)]
