"""Rows that are looked at before they are admitted, where a filter or a curriculum leaves some out.

Owns what replicas have told of the rows that come next, and what follows for an admission. Does not own rows or filters (a
replica is asked: `roles/data/next_rows.py`) or who rests (`curriculum.py`).

    lease -> {"look": {"position": 20, "numbers": {"gsm8k": 12}}}       a replica is asked for what comes next
    looked_at(20, [["gsm8k", 15], ...], "gsm8k", 12, [[7, "too short"], [3, ""]], 7472)
                                                                        and tells: row 7, which its filter leaves out, and row 3
    -> left out: rows up to number 13, for {"too short": 1}
       admit group 9 at position 20 with row 3 of gsm8k, its number 13

Positions are of groups and say of which source each is, so a mixture keeps its weights whatever is left out of a source; numbers
count the rows of one source, used or not. What is told is a function of them: it is kept here alone, and asked for again after a
restart. What became of it is in the journal.

Invariant: the rows of a source are admitted or left out in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event


class Lookahead:
    """What was told. `wanted`: what the last plan lacked, None where it admits."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] | None = None
        self._sources: dict[int, tuple[str, int]] = {}  # position -> its source, and its number where none is left out
        self._rows: dict[str, dict[int, tuple[int, str]]] = {}  # source -> number -> row, and why it is left out
        self._num_rows: dict[str, int] = {}

    def tell(
        self, position: int, sources: Sequence[Sequence[Any]],
        source: str, number: int, rows: Sequence[Sequence[Any]], num_rows: int,
    ) -> None:  # fmt: skip
        """The sources from a position on, and the rows of that position's from a number on, of so many in a pass."""
        self._sources = {position + i: (of, at) for i, (of, at) in enumerate(sources)}
        self._rows[source] = {number + i: (row, why) for i, (row, why) in enumerate(rows)}
        self._num_rows[source] = num_rows

    def plan(self, index: Index, admission: Event) -> list[Event]:
        """The event with which a group is admitted, behind the one that leaves out the rows before its own; without the former
        where something is `wanted`."""
        self.wanted = None
        if (found := self._sources.get(admission["position"])) is None:
            self.wanted = {"position": admission["position"], "numbers": index.numbers}
            return []
        source, step = found[0], admission["step"]
        told, number = self._rows.get(source, {}), index.numbers.get(*found)
        filtered, rested = Counter[str](), Counter[str]()
        admitted, num_left = None, index.rows_to_a_pass(source, self._num_rows.get(source, 0))
        while admitted is None and number in told and filtered.total() + rested.total() < num_left:
            row, why = told.pop(number)
            if why:
                filtered[why] += 1
            elif kind := index.rests(step, source, row):
                rested[kind] += 1
            else:
                admitted = {**admission, "source": source, "row": row, "number": number}
            number += 1
        left_out: Event = {
            "event": "left_out", "source": source, "step": step, "number": number - (admitted is not None),
            "filtered": dict(filtered), "rested": dict(rested), "num_rows": self._num_rows.get(source, 0),
        }  # fmt: skip
        if admitted is None:
            self.wanted = {"position": admission["position"], "numbers": index.numbers | {source: number}}
        return ([left_out] if filtered or rested else []) + ([admitted] if admitted else [])
