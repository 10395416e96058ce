"""Row ids, and ranges of them.

Owns the form of a row id and of a run. A row id is (record number, place in the record) in one integer, so neighbours in a
record are neighbours in number and a claim of whole records is a few pairs, however many rows it has. Knows nothing else.

    record 5, rows 0 to 63        ids 5 << 20 ... (5 << 20) + 63
    a run                         [5 << 20, 64]
    compress([8, 9, 10, 12])      [[8, 3], [12, 1]]

Invariant: a run never leaves its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

ROW_BITS = 20
MAX_ROWS = 1 << ROW_BITS
"""Most rows of one record."""
ROW_MASK = MAX_ROWS - 1

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
