"""Lines: where each line of a JSONL file begins, however large the file is.

Owns the scan for them, by several threads, and the index that is kept of a large file, so that no later start reads the file
whole. Does not own what a line says (`sources.py`).

    lines = Lines(file)
    len(lines), lines.span(2)  ->  10000000, (511, 760)          first byte and end of the third line that is not blank

An index takes 8 bytes a line, in the cache of derived files (`files.py`): 80 MB for ten million lines, and no memory. Files below
a megabyte are scanned each time. Where no index can be written it stays in memory.

Invariant: lines are those of the file when it was opened; an index of another state of the file is never read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from rondo.roles.data.files import File, derived

log = logging.getLogger(__name__)

_SCAN_BYTES = 1 << 20
"""A part: as much as stays in the caches of a processor while it is looked through."""
_MOST_THREADS = 4
_LINE_BYTES = 1 << 12
"""At once, of a line that may be blank."""
_KEPT_FROM_BYTES = 1 << 20
_SPACE = np.isin(np.arange(256), list(b"\n\r\t\v\f ")).astype(bool)
"""Whether a line that begins with this byte may be blank."""
_MAGIC = 0x1_0A_72_6F_6E_64_6F
"""The first word of an index; the numbers of lines and of blank lines follow, and then both."""
_HEADER_WORDS = 3


class Lines:
    """The lines of a file that are not blank, by number. `keep`: whether a descriptor of its index may stay open."""

    def __init__(self, file: File, *, keep: bool) -> None:
        kept = None
        if file.num_bytes >= _KEPT_FROM_BYTES:
            try:
                kept = derived(file, ".index", lambda out: _write(out, file), _is_index)
            except OSError as error:
                log.warning("where the lines of %s begin stays in memory, since no index can be written: %s",
                            file.path, error)  # fmt: skip
        if kept is not None:
            index = File(kept, keep=keep)
            _, num_starts, num_blank = np.frombuffer(index.read(0, 8 * _HEADER_WORDS)[0], np.int64).tolist()

            def words(first: int, end: int) -> np.ndarray:
                return np.frombuffer(index.read(8 * (_HEADER_WORDS + first), 8 * (_HEADER_WORDS + end))[0], np.int64)
        else:
            starts, blank = _scanned(file)
            every, num_starts, num_blank = np.concatenate([starts, blank]), len(starts), len(blank)

            def words(first: int, end: int) -> np.ndarray:
                return every[first:end]

        self._words: Callable[[int, int], np.ndarray] = words
        self._num_lines = num_starts - 1
        self._blank = words(num_starts, num_starts + num_blank)  # of every blank line: how many others are above it

    def __len__(self) -> int:
        return self._num_lines

    def span(self, number: int) -> tuple[int, int]:
        """First byte and end, without the newline; blank lines below it may be in it."""
        start, following = self._words(number, number + 2).tolist()
        return start, following - 1

    def lengths(self, num_lines: int) -> Iterator[np.ndarray]:
        """int64, bytes of the first lines, some at a time."""
        step = 1 << 20
        for first in range(0, num_lines, step):
            yield np.diff(self._words(first, min(first + step, num_lines) + 1)) - 1

    def number_in_file(self, number: int) -> int:
        """Counted from 1, blank ones included."""
        return number + 1 + int(np.searchsorted(self._blank, number, side="right"))


def _scan(file: File) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(first bytes of lines that are not blank, and of those that are), some at a time; last the end of the last line + 1.

    Threads look through parts beside each other: neither reading nor numpy's searches hold Python's lock."""
    end, parts = file.num_bytes, deque[Future[tuple[np.ndarray, np.ndarray]]]()
    threads, buffers = min(_MOST_THREADS, len(os.sched_getaffinity(0))), _Buffers()
    with file.current_path().open("rb") as text, ThreadPoolExecutor(threads) as scanning:
        # Lines that come while it is scanned are not of the file as it was opened.
        for first in range(0, end, _SCAN_BYTES):
            parts.append(scanning.submit(_scan_part, text.fileno(), first, end, buffers))
            if len(parts) > 2 * threads:  # what is found and not yet taken lies in memory
                yield parts.popleft().result()
        yield from (part.result() for part in parts)
        ends_line = end == 0 or os.pread(text.fileno(), 1, end - 1) == b"\n"
    yield np.array([end + (not ends_line)]), np.zeros(0, np.int64)


class _Buffers(threading.local):
    """What a thread looks through, and where newlines are: to ask for memory for each part costs more than to look through it."""

    def __init__(self) -> None:
        self.text, self.newlines = np.empty(_SCAN_BYTES + 1, np.uint8), np.empty(_SCAN_BYTES, bool)


def _scan_part(fd: int, first: int, end: int, buffers: _Buffers) -> tuple[np.ndarray, np.ndarray]:
    """As `_scan`, of the lines behind the newlines of one part, and of the file's first."""
    found = buffers.text[: os.preadv(fd, [buffers.text.data[: end - first]], first)]
    # The last byte is the next part's, with which the line behind a last newline begins; at the end of the file there is none.
    begins = np.flatnonzero(np.equal(found[:-1], ord("\n"), out=buffers.newlines[: max(0, len(found) - 1)])) + 1
    if first == 0 and len(found):
        begins = np.insert(begins, 0, 0)
    # A row is a JSON object, which begins with a brace: only lines that begin otherwise are read while scanning.
    blank = [at for at in begins[_SPACE[found[begins]]].tolist() if _is_blank(fd, first + at, end)]
    kept = np.setdiff1d(begins, blank, assume_unique=True) if blank else begins
    return kept + first, np.array(blank, np.int64) + first


def _is_blank(fd: int, at: int, end: int) -> bool:
    """Whether nothing but white space is in the line that begins here."""
    while piece := os.pread(fd, min(_LINE_BYTES, end - at), at):
        line, newline, _ = piece.partition(b"\n")
        if line.strip():
            return False
        if newline:
            break
        at += len(piece)
    return True


def _scanned(file: File) -> tuple[np.ndarray, np.ndarray]:
    """Everything at once, in memory: the words of an index without its header."""
    starts, blank = zip(*_scan(file), strict=True)
    every = np.concatenate(starts)
    return every, np.searchsorted(every, np.concatenate(blank))


def _write(out: IO[bytes], file: File) -> None:
    num_starts, blank = 0, [np.zeros(0, np.int64)]
    out.write(bytes(8 * _HEADER_WORDS))
    for starts, empty in _scan(file):
        out.write(starts.tobytes())
        if len(empty):
            blank.append(num_starts + np.searchsorted(starts, empty))
        num_starts += len(starts)
    out.write(np.concatenate(blank).astype(np.int64).tobytes())
    out.seek(0)
    out.write(np.array([_MAGIC, num_starts, sum(map(len, blank))], np.int64).tobytes())


def _is_index(path: Path) -> bool:
    """Whether a whole one lies there."""
    try:
        with path.open("rb") as file:
            words = np.frombuffer(file.read(8 * _HEADER_WORDS), np.int64).tolist()
        return words[:1] == [_MAGIC] and path.stat().st_size == 8 * (_HEADER_WORDS + sum(words[1:]))
    except (OSError, ValueError):
        return False
