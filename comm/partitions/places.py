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

from rondo.comm.partitions.entry import Entry, places_of
from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, Run
from rondo.comm.partitions.table import Table


def places(table: Table, runs: Sequence[Run], columns: Iterable[str]) -> dict[str, Any]:
    """Raises KeyError when a row has not one of the columns."""
    records: dict[int, int] = {}
    parts = [(table.entries[run[0] >> ROW_BITS], *places_of(run[0], run[1])[1:]) for run in runs]
    answer: dict[str, Any] = {
        "rows": runs,
        "columns": {name: _pieces(name, parts, records) for name in columns},
        "dropped": table.shelf.num_dropped,
    }
    found = (table.shelf.sources[num] for num in records)
    answer["records"] = [[source.ring, source.pos, source.seq] for source in found]
    return answer | facts(parts)


def facts(parts: Sequence[tuple[Entry, int, int]]) -> dict[str, Any]:
    """What was said of these rows: (entry, first place, end place) each."""
    found: dict[str, Any] = {}
    if any(entry.keys is not None for entry, _, _ in parts):
        found["keys"] = [entry.key(i) for entry, first, end in parts for i in range(first, end)]
    if any(entry.groups is not None for entry, _, _ in parts):
        found["groups"] = [entry.group(i) for entry, first, end in parts for i in range(first, end)]
    if any(entry.versions is not None for entry, _, _ in parts):
        found["versions"] = [entry.version(i) for entry, first, end in parts for i in range(first, end)]
    if any(entry.tokens is not None for entry, _, _ in parts):
        found["tokens"] = [entry.cost(i) for entry, first, end in parts for i in range(first, end)]
    if any(entry.tags is not None for entry, _, _ in parts):
        found["tags"] = [entry.tag(i) for entry, first, end in parts for i in range(first, end)]
    return found


def with_columns(table: Table, runs: Iterable[Run]) -> tuple[list[list[int]], list[list[str]]]:
    """The same rows as runs of rows with equal columns, and the columns of each."""
    found: list[list[int]] = []
    columns: list[list[str]] = []
    for start, length in runs:
        entry, first = table.entry(start), start & ROW_MASK
        whole = all(entry.whole(name) for name in entry.columns)
        for at in range(0, length, length if whole else 1):
            names = [name for name in entry.columns if entry.place(name, first + at) >= 0]
            if at and names == columns[-1]:
                found[-1][1] += 1
            else:
                found.append([start + at, length if whole else 1])
                columns.append(names)
    return found, columns


def common_columns(table: Table, ids: Sequence[int]) -> list[str]:
    """The columns that every one of these rows has, in the order of the first."""
    if not ids:
        return []
    names = list(table.entry(ids[0]).columns)
    return [name for name in names if all(table.entry(id).place(name, id & ROW_MASK) >= 0 for id in ids)]


def _pieces(name: str, parts: Sequence[tuple[Entry, int, int]], records: dict[int, int]) -> list[list[int]]:
    pieces: list[list[int]] = []
    for entry, first, end in parts:
        column = entry.columns.get(name)
        if isinstance(column, int):
            _add(pieces, records.setdefault(column, len(records)), first, end - first)
            continue
        for i in range(first, end):
            place = -1 if column is None else column[i]
            if place < 0:
                label = entry.key(i) or entry.num << ROW_BITS | i
                raise KeyError(f"row {label} must have column {name}, got {', '.join(entry.columns) or 'none'}.")
            _add(pieces, records.setdefault(place >> ROW_BITS, len(records)), place & ROW_MASK, 1)
    return pieces


def _add(pieces: list[list[int]], record: int, first: int, rows: int) -> None:
    if pieces and pieces[-1][0] == record and pieces[-1][1] + pieces[-1][2] == first:
        pieces[-1][2] += rows
    else:
        pieces.append([record, first, rows])
