"""Metrics: the curves of a run by name, read once, kept as columns, thinned out for whoever draws them.

Owns which numbers are curves, over which steps, and what a bucket of many points tells. Does not own the records
(`runtime/records/ledger.py` writes them). Invariants: a record is parsed once, here or in an index beside the file that is as
old; a step that ran again counts as its last run; no call holds the file in memory.

    metrics = Metrics(run); metrics.advance()           # again later: what has come since
    metrics.series(["reward_mean"], None, None, 500)    # {"reward_mean": {"x": [...], "mean": [...], "min": [...], "max":
    [...]}}
"""

from __future__ import annotations

import bisect
import threading
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rondo.launch.dashboard.blocks import FOLDER, Blocks
from rondo.launch.metrics.descriptions import numbers
from rondo.launch.metrics.exposition import process_of
from rondo.launch.report.records import goes_back_to, is_record, is_step
from rondo.runtime.checkpoints import GOES_ON
from rondo.runtime.records.record import read_lines
from rondo.runtime.records.tail import Tail

_NO_CURVES = frozenset({"time", "step", "rank", "waits_s", "evaluation"})
_BLOCK_BYTES = 8 << 20
"""Of metrics.jsonl, behind which an index is worth writing."""
_NAN = float("nan")
_HEAD_BYTES = 512


class Table:
    """The records of one source: `at` their steps, and a column each name, which may end before the last record."""

    def __init__(self) -> None:
        self.at = array("d")
        self.columns: dict[str, array[float]] = {}

    def add(self, step: float, values: Iterator[tuple[str, float]]) -> None:
        row = len(self.at)
        self.at.append(step)
        for name, value in values:
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = array("d")
            if len(column) < row:
                column.extend([_NAN] * (row - len(column)))
            column.append(value)

    def cut(self, step: float) -> None:
        """Without what is of this step, or of a later one."""
        row = bisect.bisect_left(self.at, step)
        for column in (self.at, *self.columns.values()):
            del column[row:]

    def rows(self, first: int) -> tuple[list[str], np.ndarray]:
        """Names, and float64 [1 + names, rows]: what came from row `first` on, the steps first."""
        names = list(self.columns)
        found = np.full((1 + len(names), len(self.at) - first), np.nan)
        found[0] = self.at[first:]
        for number, name in enumerate(names, 1):
            column = np.array(self.columns[name][first:])
            found[number, : len(column)] = column
        return names, found

    def extend(self, names: Sequence[str], rows: np.ndarray) -> None:
        before = len(self.at)
        self.at.frombytes(rows[0].tobytes())
        for name, values in zip(names, rows[1:], strict=True):
            column = self.columns.setdefault(name, array("d"))
            column.extend([_NAN] * (before - len(column)))
            column.frombytes(values.tobytes())


class Metrics:
    """Of one run directory. Safe from any thread; calls take their turn."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._blocks = Blocks(run / FOLDER / "metrics")
        self._lock = threading.Lock()
        self._opened = False
        self._empty()

    def _empty(self) -> None:
        self._tail = Tail(self._path)
        self._tables: dict[str, Table] = {}
        self._written: dict[str, int] = {}
        self._offset_written = 0
        self._evaluations: list[dict[str, Any]] = []
        self._num_evaluations_written = 0
        self._step = 0.0
        self.last: dict[str, Any] = {}
        """The newest record of a step."""

    @property
    def share(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return 1.0 if self._tail.done else self._tail.offset / self._tail.size

    def advance(self, seconds: float = 0.5) -> None:
        """Reads what has come, for about so long; `share` says whether that was all."""
        with self._lock:
            if not self._opened:
                self._opened = True
                self._load()
            until = time.monotonic() + seconds
            while True:
                lines = self._tail.read()
                if self._tail.shrunk:
                    self._blocks.clear()
                    self._empty()
                    continue
                for record in read_lines(lines, self._path, is_record):
                    self._add(record)
                if self._tail.offset - self._offset_written >= _BLOCK_BYTES:
                    self._write()
                if not lines or self._tail.done or time.monotonic() > until:
                    return

    def _add(self, record: Mapping[str, Any]) -> None:
        if (back := goes_back_to(record, self._step + 1 if self.last else 0)) is not None:
            self._go_back(back)
        if GOES_ON in record:
            return
        if "evaluation" in record:
            self._evaluations.append({"time": record.get("time"), **record["evaluation"]})
            return
        source = "" if (of_step := is_step(record)) else f"{process_of(record)}/"
        if of_step:
            self._step = float(record["step"])
            self.last = dict(record)
        values = list(numbers(record, source, _NO_CURVES, _NO_CURVES))
        if values:
            step = record.get("step", self._step)
            at = float(step) if isinstance(step, int | float) else self._step
            if of_step and isinstance(record.get("time"), int | float):
                values.append(("time", record["time"]))
            self._tables.setdefault(source, Table()).add(at, iter(values))

    def _go_back(self, version: int) -> None:
        """Forget what is of later steps; the index is written anew."""
        for table in self._tables.values():
            table.cut(version)
        self._evaluations = [each for each in self._evaluations if each.get("version", 0) <= version]
        self._step = min(self._step, max(version - 1, 0))
        self.last = self.last if self.last.get("step", -1) < version else {}
        self._blocks.clear()
        self._written, self._offset_written, self._num_evaluations_written = {}, 0, 0

    def _write(self) -> None:
        tables, data = {}, []
        for source, table in self._tables.items():
            names, rows = table.rows(self._written.get(source, 0))
            tables[source] = {"names": names, "rows": rows.shape[1]}
            data.append(rows.tobytes())
            self._written[source] = len(table.at)
        head = {
            "offset": self._tail.offset, "crc_of": self._crc(), "tables": tables, "step": self._step, "last": self.last,
            "evaluations": self._evaluations[self._num_evaluations_written :],
        }  # fmt: skip
        self._blocks.append(head, b"".join(data))
        self._offset_written, self._num_evaluations_written = self._tail.offset, len(self._evaluations)

    def _load(self) -> None:
        """What the index holds, where it is of this file."""
        crc = self._crc()
        size = self._path.stat().st_size if self._path.is_file() else 0
        for head, data in self._blocks.read():
            if head["crc_of"] != crc or head["offset"] > size:
                self._blocks.clear()
                self._empty()
                return
            at = 0
            for source, told in head["tables"].items():
                shape = (1 + len(told["names"]), told["rows"])
                rows = np.frombuffer(data, np.float64, shape[0] * shape[1], at).reshape(shape)
                at += rows.nbytes
                table = self._tables.setdefault(source, Table())
                table.extend(told["names"], rows)
                self._written[source] = len(table.at)
            self._evaluations += head["evaluations"]
            self._step, self.last = head["step"], head["last"]
            self._tail.offset = self._offset_written = head["offset"]
            self._num_evaluations_written = len(self._evaluations)

    def _crc(self) -> int:
        """Of the beginning of the file, by which a run is told from another in its place."""
        try:
            with self._path.open("rb") as file:
                return zlib.crc32(file.readline(_HEAD_BYTES))
        except FileNotFoundError:
            return 0

    # ---- what is asked ----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Of all curves, those of steps first."""
        with self._lock:
            return [name for _, table in sorted(self._tables.items()) for name in sorted(table.columns)]

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations as they were told, with their "time"."""
        with self._lock:
            return list(self._evaluations)

    def series(self, names: Sequence[str], first: float | None, last: float | None, points: int) -> dict[str, Any]:
        """Name -> its curve over steps `first` to `last`, as at most `points` buckets; unknown names are left out."""
        found = {}
        for name in names:
            with self._lock:
                table = next((each for each in self._tables.values() if name in each.columns), None)
                if table is None:
                    continue
                y = np.array(table.columns[name])
                x = np.array(table.at[: len(y)])
            found[name] = decimate(*chosen(x, y, first, last), points)
        return found

    def close(self) -> None:
        with self._lock:
            self._blocks.close()


def chosen(x: np.ndarray, y: np.ndarray, first: float | None, last: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The points with a value, in order of steps, each step once as it was told last, of `first` to `last`."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) and not (np.diff(x) > 0).all():
        x, at = np.unique(x[::-1], return_index=True)
        y = y[::-1][at]
    begin = 0 if first is None else int(np.searchsorted(x, first))
    end = len(x) if last is None else int(np.searchsorted(x, last, "right"))
    return x[begin:end], y[begin:end]


def decimate(x: np.ndarray, y: np.ndarray, points: int) -> dict[str, Any]:
    """At most `points` buckets of equally many steps: the first step of each, and mean, least and greatest value in it. "num":
    how many values there are. Where each has a bucket of its own, "mean" is the value and the others are left out."""
    num = len(x)
    if num <= points:
        return {"num": num, "x": x.tolist(), "mean": y.tolist()}
    edges = np.linspace(x[0], x[-1] + 1, points, endpoint=False)
    starts = np.unique(np.searchsorted(x, edges[edges <= x[-1]]))
    counts = np.diff(np.append(starts, num))
    return {
        "num": num, "x": x[starts].tolist(), "mean": (np.add.reduceat(y, starts) / counts).tolist(),
        "min": np.minimum.reduceat(y, starts).tolist(), "max": np.maximum.reduceat(y, starts).tolist(),
    }  # fmt: skip
