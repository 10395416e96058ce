"""Tail: the whole lines that have come to a growing file since the last look, a slice at a time.

Owns the place in the file. Does not own what a line means. Invariants: a line without its end is left for the next look; a file
that has become shorter is told (`shrunk`), and read from its beginning; no more than a slice, or one line, is in memory.
"""

from __future__ import annotations

import os
from pathlib import Path

SLICE_BYTES = 4 << 20


class Tail:
    """Of `path`, which need not be there yet, from `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self.size = 0
        self.shrunk = False

    def read(self, most: int = SLICE_BYTES) -> list[bytes]:
        """The next lines with their ends, empty where there are none; `offset` is behind them."""
        try:
            with self.path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self.shrunk = self.size < self.offset
                self.offset = 0 if self.shrunk else self.offset
                file.seek(self.offset)
                data = file.read(most)
                while b"\n" not in data and (more := file.read(most)):
                    data += more
        except FileNotFoundError:
            self.shrunk, self.size, self.offset = self.offset > 0, 0, 0
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.splitlines(keepends=True)

    @property
    def done(self) -> bool:
        """Whether the last look saw all that there was."""
        return self.offset >= self.size
