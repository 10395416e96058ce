"""Spans: neighbouring samples of one prompt group, the form in which rows are named wherever there are many.

Owns the arithmetic between single rows, spans and sets of samples. A put, a round and a commit name spans, so that they cost by
the record and by the group and not by the row; a set of samples of a group is one integer, bit i for sample i.

    rows [[7, 0], [7, 1], [7, 3]]  <->  spans [[7, 0, 2], [7, 3, 1]]          [group, first sample, how many]
    samples 0, 1 and 3             <->  0b1011

Invariant: `rows_of(spans_of(rows)) == rows`, whatever their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

RowId = list[int]  # [group, sample]
Span = list[int]  # [group, first sample, how many]


def spans_of(rows: Iterable[Sequence[int]]) -> list[Span]:
    """Rows in their order; neighbours that follow each other in one group become one span."""
    spans: list[Span] = []
    last, following = -1, -1
    for group, sample in rows:
        if sample == following and group == last:
            spans[-1][2] += 1
            following += 1
        else:
            spans.append([group, sample, 1])
            last, following = group, sample + 1
    return spans


def spans_in(group: int, numbers: Sequence[int]) -> list[Span]:
    """Samples of one group in their order."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return [[group, numbers[0], len(numbers)]]
    return spans_of([(group, number) for number in numbers])


def rows_of(spans: Iterable[Sequence[int]]) -> list[RowId]:
    """Every row by itself, in order."""
    return [[group, sample] for group, first, count in spans for sample in range(first, first + count)]


def num_rows(spans: Iterable[Sequence[int]]) -> int:
    return sum([count for _, _, count in spans])


def samples(first: int, count: int) -> int:
    """The set of the samples `first` to `first + count - 1`."""
    return ((1 << count) - 1) << first


def by_group(spans: Iterable[Sequence[int]]) -> tuple[dict[int, int], int]:
    """The set of samples of each group, and how many rows were named more than once."""
    found: dict[int, int] = {}
    repeated = 0
    for group, first, count in spans:
        named, known = samples(first, count), found.get(group, 0)
        repeated += (named & known).bit_count()
        found[group] = known | named
    return found, repeated


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
