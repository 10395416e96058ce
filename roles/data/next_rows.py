"""Which rows come next, told before they are admitted: the coordinator knows neither rows nor their order.

Owns how far is looked. Does not own which of them are admitted (`comm/bus/lookahead.py`) or what a filter says
(`row_filters.py`).

    next_rows(rows, order, "gsm8k", 12, num_used=1, filtered=True)  ->  [(7, "too short"), (3, "")]
"""

from __future__ import annotations

import time

from rondo.roles.data.cursor import Order
from rondo.roles.data.datasets import RowError, Rows
from rondo.roles.data.row_filters import Filtered

_NUM_ROWS = 256
_LONGEST_S = 1.0
"""After which no further row is read."""


def next_rows(
    rows: Rows, order: Order, source: str, number: int, num_used: int, *, filtered: bool
) -> list[tuple[int, str]]:
    """(row, why a filter leaves it out) of a source's rows from a number on: until so many can be used or a pass is over, one at
    least, none behind the last pass. A row that cannot be read is not left out: it is told when its turn comes."""
    found, began = list[tuple[int, str]](), time.monotonic()
    most = min(_NUM_ROWS, order.num_rows_of(source))
    while num_used and len(found) < most and (not found or time.monotonic() - began < _LONGEST_S):
        try:
            row = order.row_of(source, number + len(found)).row
        except IndexError:
            break
        why = ""
        try:
            if filtered:
                rows.row(row)
        except Filtered as error:
            why = error.reason
        except RowError:
            pass
        found.append((row, why))
        num_used -= not why
    return found
