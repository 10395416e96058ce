"""Fingerprints: what a run's data are when it begins, so that other rows, or the same rows in another order, are noticed.

Owns the digest of a data set, the file that keeps them in the run directory, and what a difference is called. Does not own when
they are taken (`rondo check` and the start of a run) or compared (whoever opens the data: each process, restart and resume).

    runs/x/data.json    {"data": {"num_rows": 6000, "digest": "5d1c..."}, "sft": {...}}

A digest is of a sample of the rows, at fixed positions, and of their places; `sources.py` says how many of each kind of source.
Rows that are made by a function are held out in every process alike because every process has verified their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rondo.runtime.errors import Fatal

FILE = "data.json"
_BYTES = 16


class DataChanged(Fatal):
    """The rows are not those that the run began with."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of a data set: the number of its rows, and the digest of a sample of them in their order."""

    num_rows: int
    digest: str

    def __str__(self) -> str:
        return f"{self.num_rows} rows with digest {self.digest[:8]}"


class Fingerprints:
    """Those that were taken when the run began, compared with what is opened; or none yet, and `found` has them then."""

    def __init__(self, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._known = None if known is None else {name: Fingerprint(**each) for name, each in known.items()}
        self.found: dict[str, Fingerprint] = {}

    @classmethod
    def of_run(cls, run_dir: Path) -> Fingerprints:
        """Those in a run directory."""
        file = run_dir / FILE
        return cls(orjson.loads(file.read_bytes()) if file.is_file() else None)

    def num_rows(self, name: str) -> int | None:
        """How many rows the data set had; None before it is known. What was added behind them since is not the run's."""
        known = (self._known or {}).get(name)
        return None if known is None else known.num_rows

    def compare(self, name: str, found: Fingerprint) -> None:
        """DataChanged when the data set of that name is another than it was."""
        self.found[name] = found
        known = (self._known or {}).get(name)
        if known is not None and found != known:
            raise DataChanged(
                f"{name} must have the rows that the run began with, {known}, got {found}. Restore them; or to train with these, "
                "end the run and go on with `rondo resume --accept-changes`"
            )


def sampled(num_rows: int, most: int) -> Sequence[int]:
    """At most so many positions of range(num_rows), evenly spread, the first and the last among them."""
    return range(num_rows) if num_rows <= most else [i * (num_rows - 1) // (most - 1) for i in range(most)]


def digest_of(read: Callable[[int], Any], positions: Sequence[int], also: Iterable[bytes] = ()) -> str:
    """Of the rows at these positions; a row that cannot be read counts as the kind of its error."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for each in also:
        found.update(each)
    for position in positions:
        found.update(b"%d:" % position)
        try:
            value = read(position)
        except Exception as error:  # noqa: BLE001 - a row that cannot be read is one that a run leaves out
            value = type(error).__name__
        _feed(found.update, value)
    return found.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    """The value's kind and contents, the same in every process; of an object that is no data, its kind alone."""
    update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _feed(update, key)
            try:
                item = value[key]
            except Exception as error:  # noqa: BLE001 - a value of a table that cannot be decoded
                item = type(error).__name__
            _feed(update, item)
    elif isinstance(value, set | frozenset):
        update(repr(sorted(map(repr, value))).encode("utf-8", "backslashreplace"))
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(update, item)
    elif isinstance(value, bytes | bytearray | memoryview):
        update(bytes(value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(value.tobytes())
    elif value is None or isinstance(value, str | int | float | np.generic):
        update(repr(value).encode("utf-8", "backslashreplace"))
    update(b";")
