"""Filters of rows: a function of the user's says of each row whether it is used.

Owns what a filter is given and may return. Does not own when rows are read (`datasets.py`) or where reasons are counted (the
coordinator of a run, `rondo check`).

    def long_enough(row):           # data.filter: the row as it lies, {"question": ..., "answer": ..., "level": 3}
        return True if len(row["question"]) > 20 else "too short"

False leaves a row out under the filter's name, text under that text. A filter says the same of a row whenever it is asked. A row
of which it raises is unusable, as one that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rondo.roles.data.sources import RowError

MOST_CHARACTERS = 80
"""Of a reason; a longer one is cut off."""


class Filtered(RowError):
    """The filter leaves the row out; `reason` is what is counted."""

    def __init__(self, row: str, reason: str) -> None:
        super().__init__(f"{row}: left out by data.filter: {reason}")
        self.reason = reason


def refuse_filtered(keeps: Callable[[dict[str, Any]], Any], values: Mapping[str, Any], name: str) -> None:
    """Raise Filtered if the filter leaves the row of these values out. RowError if it raises, or returns anything else."""
    function = getattr(keeps, "__name__", "the filter")
    try:
        found = keeps(dict(values))
    except Exception as error:  # the user's function, of a row that it did not expect
        raise RowError(
            f"{name}: data.filter must answer for every row, got {type(error).__name__}: {error} from {function}. Correct it, or "
            "the row"
        ) from error
    if isinstance(found, str) and found.strip():
        raise Filtered(name, " ".join(found.split())[:MOST_CHARACTERS])
    if not isinstance(found, bool | np.bool_):
        raise RowError(
            f"{name}: data.filter must return True, False or a reason, got {found!r:.80} from {function}. Correct it"
        )
    if not found:
        raise Filtered(name, function)
