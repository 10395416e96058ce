"""What became of every sample that producers tried to put, as in Jepsen's total-queue: attempted, acknowledged, read.

Owns the judgement, pure; not how the facts are collected. A row is (group, sample).

    lost          acknowledged, its step is committed, and never read
    unexpected    read, and nobody ever tried to put it
    duplicated    read more than once
    recovered     read although its producer did not live to see the put return
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Row = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    num_attempted: int
    num_acknowledged: int
    num_read: int
    lost: frozenset[Row]
    unexpected: frozenset[Row]
    duplicated: frozenset[Row]
    recovered: frozenset[Row]

    @property
    def good(self) -> bool:
        return not (self.lost or self.unexpected or self.duplicated)


def judge(
    attempted: Iterable[Row],
    acknowledged: Iterable[Row],
    read: Iterable[Row],
    step_of: Mapping[int, int],
    num_committed: int,
) -> Verdict:
    """`step_of`: group -> the step that it was admitted for; `num_committed` steps are committed."""
    tried, put, times = set(attempted), set(acknowledged), Counter(read)
    due = {row for row in put if step_of[row[0]] < num_committed}
    return Verdict(
        num_attempted=len(tried),
        num_acknowledged=len(put),
        num_read=times.total(),
        lost=frozenset(due - times.keys()),
        unexpected=frozenset(times.keys() - tried),
        duplicated=frozenset(row for row, count in times.items() if count > 1),
        recovered=frozenset((times.keys() & tried) - put),
    )
