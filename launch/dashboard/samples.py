"""Samples: the prompts and answers that a run kept, by number, found by step, reward and text, newest first.

Owns where each line lies and what it is filtered by. Does not own the lines (`roles/sampling/` writes `samples/*.jsonl`), and
keeps none of them. Invariants: a line is parsed once for the index, and again only when it is shown, or
lies near to a text that is searched; one call reads no more than it is given time for, and says where to go on; a file that was
written anew has all indexed again.

    samples = Samples(run); samples.advance()
    samples.find(Wanted(search="27 + 61"), before=None, limit=20)       # {"rows": [...], "next": 512, "share": 1.0, ...}

A row's number is its place in the index: it stays, until a file is written anew.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import orjson

from rondo.launch.dashboard.blocks import FOLDER, Blocks
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.tail import Tail

TRAINED = "trained"
"""The kind of samples that were made for a step; others are named by their evaluation."""
_ROW = np.dtype(
    [("file", "i4"), ("size", "i4"), ("offset", "i8"), ("key", "i8"), ("step", "i4"), ("sample", "i4"),
     ("reward", "f8"), ("failed", "?"), ("cut", "?")]
)  # fmt: skip
_MOST = 2**31 - 1
"""That a column of `_ROW` holds."""
_BLOCK_ROWS = 1 << 14
_NEWEST = 8
"""Files that may still grow."""
_MOST_OF_LINE = 8 << 20
_PIECE_BYTES = 1 << 16
"""So much of a file is looked through at once; no line of it is parsed where it does not hold the text."""
_SHOWN, _SHOWN_WHOLE = 2_000, 200_000
_GROUP = 256
_DEEP = 32
"""So far into lists and objects is shown what a line holds."""
_HEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which samples: of a kind, of steps (or versions of evaluations have none), of rewards, failed ones, with a text in
    them."""

    kind: str | None = None
    first: int | None = None
    last: int | None = None
    least: float | None = None
    most: float | None = None
    failed: bool = False
    search: str = ""


@dataclass(slots=True)
class _File:
    name: str
    head: int = 0
    """Of the beginning of an evaluation's file, which may be written anew; a step's is only appended to."""
    offset: int = 0

    @property
    def kind(self) -> str:
        return TRAINED if self.name.startswith("step_") else self.name.partition(".")[0]


class Samples:
    """Of one run directory. Safe from any thread; calls take their turn."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "samples"
        self._blocks = Blocks(run / FOLDER / "samples")
        self._lock = threading.Lock()
        self._opened = False
        self._empty()

    def _empty(self) -> None:
        self._files: list[_File] = []
        self._numbers: dict[str, int] = {}
        self._evaluations: list[int] = []
        self._rows = np.zeros(1024, _ROW)
        self._num = self._num_written = 0
        self._open: list[int] = []
        """Files that are not read to their end yet, in order."""
        self._looked_ns = -1
        self._changed: set[int] = set()

    @property
    def share(self) -> float:
        """How much of the files has been read, 0 to 1."""
        return 1.0 - len(self._open) / max(1, len(self._files))

    def advance(self, seconds: float = 0.5) -> None:
        """Reads what has come, for about so long; `share` says whether that was all."""
        with self._lock:
            if not self._opened:
                self._opened = True
                self._load()
            until = time.monotonic() + seconds
            self._look()
            while self._open and time.monotonic() < until:
                number = self._open[0]
                if self._read(number):
                    self._open.pop(0)
                if self._num - self._num_written >= _BLOCK_ROWS:
                    self._write()
            if not self._open and self._num - self._num_written >= _BLOCK_ROWS // 8:
                self._write()

    def _look(self) -> None:
        """Finds new files, and those that grow."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return
        waiting = set(self._open)
        if changed_ns != self._looked_ns:
            with os.scandir(self._folder) as entries:
                found = {each.name for each in entries if each.name.endswith(".jsonl") and each.is_file()}
            others = (self._files[number] for number in self._evaluations)
            if not self._numbers.keys() <= found or any(self._head(each.name) != each.head for each in others):
                self._blocks.clear()
                self._empty()
                waiting = set()
            new = sorted(found - self._numbers.keys(), key=_in_order)
            for name in new:
                self._file(_File(name))
            waiting |= {self._numbers[name] for name in new}
            self._looked_ns = changed_ns
        num = len(self._files)
        for number in {*range(max(0, num - _NEWEST), num), *self._evaluations}:
            file = self._files[number]
            with suppress(FileNotFoundError):  # which the next look finds gone
                if number not in waiting and (self._folder / file.name).stat().st_size > file.offset:
                    waiting.add(number)
        self._open = sorted(waiting)

    def _file(self, file: _File) -> None:
        self._numbers[file.name] = len(self._files)
        if file.kind != TRAINED:
            file.head = file.head or self._head(file.name)
            self._evaluations.append(len(self._files))
        self._files.append(file)

    def _head(self, name: str) -> int:
        """Of a whole first line, whose time is its own; 0 before there is one."""
        try:
            with (self._folder / name).open("rb") as file:
                line = file.readline(_HEAD_BYTES)
        except FileNotFoundError:
            return 0
        return crc32(line) if len(line) == _HEAD_BYTES or line.endswith(b"\n") else 0

    def _read(self, number: int) -> bool:
        """A slice of a file; whether it has no more whole lines."""
        file = self._files[number]
        tail = Tail(self._folder / file.name, file.offset)
        at = file.offset
        step = int(file.name[5:-6]) & _MOST if file.kind == TRAINED and file.name[5:-6].isdecimal() else -1
        lines = tail.read()
        if lines and not file.head and file.kind != TRAINED:
            file.head = self._head(file.name)
        for line in lines:
            row = _row(line)
            if row is not None:
                self._add((number, min(len(line), _MOST), at, row[0], step, *row[1:]))
            at += len(line)
        file.offset = at
        self._changed.add(number)
        return not lines or tail.done

    def _add(self, row: tuple[Any, ...]) -> None:
        if self._num == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(len(self._rows), _ROW)])
        self._rows[self._num] = row
        self._num += 1

    def _write(self) -> None:
        files = [[n, self._files[n].name, self._files[n].head, self._files[n].offset] for n in sorted(self._changed)]
        self._blocks.append({"files": files}, self._rows[self._num_written : self._num].tobytes())
        self._num_written = self._num
        self._changed.clear()

    def _load(self) -> None:
        """What the index holds; of one that is not ours nothing."""
        rows = []
        try:
            for head, data in self._blocks.read():
                for number, name, beginning, offset in head["files"]:
                    if number == len(self._files):
                        self._file(_File(name, beginning))
                    self._files[number].head, self._files[number].offset = beginning, offset
                rows.append(np.frombuffer(data, _ROW))
        except (KeyError, IndexError, TypeError, ValueError):
            self._blocks.clear()
            self._empty()
            return
        if sum(map(len, rows)):
            self._rows = np.concatenate(rows)
            self._num = self._num_written = len(self._rows)

    # ---- what is asked ----------------------------------------------------------------------------------------------

    def find(self, wanted: Wanted, before: int | None, limit: int, seconds: float = 0.5) -> dict[str, Any]:
        """At most `limit` rows with numbers below `before`, newest first. "next": from where to go on, None at the end; it may
        come
        with few rows or none, where a text was looked for in many."""
        with self._lock:
            rows, files = self._rows[: self._num], list(self._files)
        keep = np.ones(len(rows), bool)
        if wanted.kind is not None:
            keep &= np.isin(rows["file"], [n for n, file in enumerate(files) if file.kind == wanted.kind])
        for name, value, above in (
            ("step", wanted.first, True), ("step", wanted.last, False),
            ("reward", wanted.least, True), ("reward", wanted.most, False),
        ):  # fmt: skip
            if value is not None:
                keep &= rows[name] >= value if above else rows[name] <= value
        if wanted.failed:
            keep &= rows["failed"]
        numbers = np.flatnonzero(keep)
        total = len(numbers)
        if before is not None:
            numbers = numbers[numbers < before]
        found: list[dict[str, Any]] = []
        until, text = time.monotonic() + seconds, wanted.search.casefold()
        next_row = None
        for oldest, these in self._with(text, files, rows, numbers) if text else [(0, numbers[::-1].tolist())]:
            for number, line in self._lines(files, rows, these):
                if len(found) == limit or (text and time.monotonic() > until):
                    next_row = number + 1
                    break
                if line is not None and (not text or any(text in each.casefold() for each in _texts(line))):
                    found.append(_shown(number, files, rows[number], line, _SHOWN))
            if next_row is None and text and (len(found) == limit or time.monotonic() > until):
                next_row = oldest
            if next_row is not None:
                break
        return {
            "rows": found, "next": next_row, "matching": total, "total": len(rows), "share": self.share,
            "kinds": sorted({file.kind for file in files}),
        }  # fmt: skip

    def group(self, number: int) -> dict[str, Any]:
        """A sample whole, those of its prompt group beside it, and of an evaluation's prompt the samples of other evaluations.
        ConfigError where there is no such row."""
        with self._lock:
            rows, files = self._rows[: self._num], list(self._files)
        if number >= len(rows):
            raise ConfigError(f"a sample must be one of 0 to {len(rows) - 1}, got {number}. Look for it again")
        row = rows[number]
        same = rows["key"] == row["key"]
        trained = np.isin(rows["file"], [n for n, file in enumerate(files) if file.kind == TRAINED])
        here = same & (rows["file"] == row["file"])
        elsewhere = same & ~here & ~trained if files[row["file"]].kind != TRAINED else np.zeros(len(rows), bool)

        def told(chosen: np.ndarray) -> list[dict[str, Any]]:
            numbers = np.flatnonzero(chosen)[:_GROUP].tolist()
            lines = self._lines(files, rows, numbers)
            return [_shown(each, files, rows[each], line, _SHOWN) for each, line in lines if line is not None]

        ((_, line),) = self._lines(files, rows, [number])
        sample = _shown(number, files, row, {} if line is None else line, _SHOWN_WHOLE)
        return {"sample": sample, "group": told(here), "elsewhere": told(elsewhere)}

    def _with(
        self, text: str, files: list[_File], rows: np.ndarray, numbers: np.ndarray
    ) -> Iterator[tuple[int, list[int]]]:
        """(oldest, those that may hold the casefolded `text`, newest first) of these rows, a piece of a file at a time."""
        needle = orjson.dumps(text)[1:-1]  # as it stands in a line
        offsets = rows["offset"][numbers]
        ends = offsets + rows["size"][numbers]
        of = rows["file"][numbers]
        starts = np.flatnonzero(np.diff(of, prepend=-1)).tolist()
        for first, end in reversed(list(itertools.pairwise([*starts, len(of)]))):
            try:
                file = os.open(f"{self._folder}/{files[of[first]].name}", os.O_RDONLY)
            except OSError:
                continue
            try:
                while end > first:
                    begin, last = first, int(ends[end - 1])
                    if last - int(offsets[first]) > _PIECE_BYTES:
                        begin += int(np.searchsorted(offsets[first : end - 1], last - _PIECE_BYTES))
                    at = int(offsets[begin])
                    data = os.pread(file, min(last - at, _MOST_OF_LINE), at)
                    if data.isascii() and needle.isascii():  # where a letter has one other case
                        holds = needle in data.lower()
                    else:
                        holds = needle.decode() in data.decode(errors="replace").casefold()
                    yield int(numbers[begin]), numbers[begin:end][::-1].tolist() if holds else []
                    end = begin
            finally:
                os.close(file)

    def _lines(
        self, files: list[_File], rows: np.ndarray, numbers: list[int]
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(number, line) of those rows in that order; None where the file is not what it was."""
        for number in numbers:
            row = rows[number]
            yield number, _line(self._folder / files[row["file"]].name, int(row["offset"]), int(row["size"]))

    def close(self) -> None:
        with self._lock:
            if self._num > self._num_written:
                self._write()
            self._blocks.close()


def _line(path: Path, offset: int, size: int) -> dict[str, Any] | None:
    if size > _MOST_OF_LINE:
        return {"error": f"a line of {size} bytes, which is not shown"}
    try:
        with path.open("rb", 0) as file:
            found = orjson.loads(os.pread(file.fileno(), size, offset))
    except (OSError, orjson.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def _in_order(name: str) -> tuple[bool, int, str]:
    """Evaluations first, then steps."""
    return name.startswith("step_"), len(name), name


def _row(line: bytes) -> tuple[int, int, float, bool, bool] | None:
    """(key of the prompt group, sample, reward, failed, cut) of a line; None of a torn one."""
    if not line.endswith(b"\n") or line.isspace():
        return None
    try:
        told = orjson.loads(line)
        group = told.get("group", told.get("number", -1))
        key = crc32(str(told.get("set", "")).encode()) << 31 | (int(group) & _MOST)
        reward = told.get("reward")
        value = float(reward) if isinstance(reward, int | float) else float("nan")
        return key, int(told.get("sample", 0)) & _MOST, value, "error" in told, told.get("finish_reason") == "length"
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError, OverflowError):
        return None


def _shown(number: int, files: list[_File], row: np.void, line: Mapping[str, Any], most: int) -> dict[str, Any]:
    file = files[row["file"]]
    return {"row": number, "kind": file.kind, "step": int(row["step"]) if file.kind == TRAINED else None} | {
        "line": {name: _cut(value, most) for name, value in line.items()}
    }


def _cut(value: Any, most: int, deep: int = _DEEP) -> Any:
    """The same with texts of at most so many characters, which say so, and nothing deeper than so."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most} characters more)"
    if isinstance(value, list | dict) and not deep:
        return "…"
    if isinstance(value, list):
        return [_cut(each, most, deep - 1) for each in value[:most]]
    return {name: _cut(each, most, deep - 1) for name, each in value.items()} if isinstance(value, dict) else value


def _texts(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
