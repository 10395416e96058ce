"""Where the columns of some rows lie: what a reader is told.

Owns the form of that answer, read off a table; changes nothing. Neighbouring rows whose values are neighbours are one piece,
so a batch of whole records costs a few numbers, however many rows it has.

    {"rows": [[first id, rows], ...], "records": [[ring, pos, seq], ...],
     "columns": {"tokens": [[record's place in the list, first row there, rows], ...]},
     "keys": [...], "groups": [...], "versions": [...], "tags": [...]}      each only where some row has one

Invariant: the pieces of a column, laid end to end, are the rows in the order of `rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rondo.comm.partitions.entry import SAID
from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, Run, compress, expand, row_id
from rondo.comm.partitions.table import Table


def places(table: Table, runs: Sequence[Run], columns: Iterable[str]) -> dict[str, Any]:
    """Raises KeyError when a row has not one of the columns."""
    records: dict[int, int] = {}
    pieces = {}
    for name in columns:
        found = [place for entry, rows in table.parts(runs) for place in entry.places(name, rows)]
        if -1 in found:
            id = next(id for id, place in zip(expand(runs), found, strict=True) if place < 0)
            entry = table.entry(id)
            label = entry.value("keys", id & ROW_MASK) or id
            raise KeyError(f"row {label} must have column {name}, got {', '.join(entry.columns) or 'none'}.")
        pieces[name] = [
            [records.setdefault(start >> ROW_BITS, len(records)), start & ROW_MASK, length]
            for start, length in compress(found)
        ]
    sources = [[*table.shelf.sources[record][:3]] for record in records]
    answer = {"rows": runs, "columns": pieces, "records": sources, "dropped": table.shelf.num_dropped}
    return answer | facts(table, runs)


def facts(table: Table, runs: Sequence[Run]) -> dict[str, Any]:
    """What was said of these rows."""
    parts = list(table.parts(runs))
    named = [name for name in SAID if any(name in entry.said for entry, _ in parts)]
    return {name: [value for entry, rows in parts for value in entry.values(name, rows)] for name in named}


def with_columns(table: Table, runs: Iterable[Run]) -> tuple[list[list[int]], list[list[str]]]:
    """The same rows as runs of rows with equal columns, and the columns of each."""
    found: list[list[int]] = []
    columns: list[list[str]] = []
    for entry, rows in table.parts(runs):
        step = len(rows) if entry.whole(entry.columns) else 1
        for at in range(rows.start, rows.stop, step):
            names = [name for name in entry.columns if entry.having([name], [at])]
            if at > rows.start and names == columns[-1]:
                found[-1][1] += step
            else:
                found.append([row_id(entry.num, at), step])
                columns.append(names)
    return found, columns


def common_columns(table: Table, ids: Sequence[int]) -> list[str]:
    """The columns that every one of these rows has, in the order of the first."""
    names = list(table.entry(ids[0]).columns) if ids else []
    return [name for name in names if all(table.entry(id).having([name], [id & ROW_MASK]) for id in ids)]
