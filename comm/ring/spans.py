"""Spans: neighbouring samples of one prompt group, the form in which rows are named wherever there are many.

Owns the arithmetic between single rows, spans and sets of samples. A row is named (group, sample, part): what accounts count is
samples, and a sample has one row, its part 0, or several, where an episode branched or was compacted. Puts, rounds and commits,
and so the journal and checkpoints, name spans, so that they cost by the record and by the group and not by the row; a set of
samples of a group is one integer, bit i for sample i.

    rows [[7, 0, 0], [7, 1, 0], [7, 3, 0]]  <->  spans [[7, 0, 0, 2], [7, 0, 3, 1]]      [group, part, first sample, how many]
    rows [[7, 1, 0], [7, 1, 1], [7, 1, 2]]  <->  spans [[7, 0, 1, 1], [7, 1, 1, 1], [7, 2, 1, 1]]      a sample of three parts
    samples 0, 1 and 3                      <->  0b1011

A span lies in one part: the samples of a group are neighbours in their parts 0, those that have more in their parts 1, and so
on; so n samples of one part are one span.

Invariants: `rows_of(spans_of(rows)) == rows`, whatever their order; every sample has a part 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

RowId = list[int]  # [group, sample, part]
Span = list[int]  # [group, part, first sample, how many]


def spans_of(rows: Iterable[Sequence[int]]) -> list[Span]:
    """Rows in their order; neighbours that follow each other in one part of one group become one span."""
    spans: list[Span] = []
    last, following = (-1, -1), -1
    for group, sample, part in rows:
        if sample == following and (group, part) == last:
            spans[-1][3] += 1
            following += 1
        else:
            spans.append([group, part, sample, 1])
            last, following = (group, part), sample + 1
    return spans


def spans_in(group: int, numbers: Sequence[int], part: int = 0) -> list[Span]:
    """One part of some samples of a group, in their order."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return [[group, part, numbers[0], len(numbers)]]
    return spans_of([(group, number, part) for number in numbers])


def rows_of(spans: Iterable[Sequence[int]]) -> list[RowId]:
    """Every row by itself, in order."""
    return [[group, sample, part] for group, part, first, count in spans for sample in range(first, first + count)]


def num_rows(spans: Iterable[Sequence[int]]) -> int:
    return sum([count for _, _, _, count in spans])


def num_samples(spans: Iterable[Sequence[int]]) -> int:
    """How many samples these are, all parts of each."""
    return sum([count for _, part, _, count in spans if not part])


def samples(first: int, count: int) -> int:
    """The set of the samples `first` to `first + count - 1`."""
    return ((1 << count) - 1) << first


def by_part(spans: Iterable[Sequence[int]]) -> tuple[dict[tuple[int, int], int], int]:
    """The set of samples of each (group, part), and how many rows were named more than once."""
    found: dict[tuple[int, int], int] = {}
    repeated = 0
    for group, part, first, count in spans:
        named, known = samples(first, count), found.get((group, part), 0)
        repeated += (named & known).bit_count()
        found[group, part] = known | named
    return found, repeated


def whole_samples(spans: Iterable[Sequence[int]]) -> dict[int, int]:
    """The set of samples of each group of which no part is left out before the last one that is named."""
    named, _ = by_part(spans)
    whole = {group: chosen for (group, part), chosen in named.items() if not part}
    for (group, part), chosen in named.items() if len(named) > len(whole) else ():
        if part:
            whole[group] = whole.get(group, 0) & ~(chosen & ~named.get((group, part - 1), 0))
    return whole


def runs(chosen: int) -> Iterator[tuple[int, int]]:
    """Neighbours in a set of samples: (first, count), in order."""
    at = 0
    while chosen:
        skipped = (chosen & -chosen).bit_length() - 1
        chosen >>= skipped
        count = (~chosen & (chosen + 1)).bit_length() - 1
        yield at + skipped, count
        at += skipped + count
        chosen >>= count


def members(chosen: int) -> list[int]:
    """The samples of a set, in order."""
    return [sample for first, count in runs(chosen) for sample in range(first, first + count)]
