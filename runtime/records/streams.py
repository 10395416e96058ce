"""Streams: stdout and stderr of a command, which may be closed, or go away while it works.

Owns that no write to them raises. Does not own what is written. Light, since each command begins with it.

Invariant: whatever is written where nobody can read, by whatever library, changes neither the life of a run nor its exit code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENXIO)
ERRORS: dict[str, OSError] = {}
"""Of "stdout" and "stderr", why the last write was dropped."""


class _Stream(io.FileIO):
    """The raw side. A write that fails is dropped and counted; where nobody can read any more, so are all that follow."""

    def __init__(self, fd: int, what: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self.what = what

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # somebody else has made the pipe non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            ERRORS[self.what] = error
            if error.errno in _GONE:  # of a disk that is full there may be room later
                with contextlib.suppress(OSError):
                    os.dup2(nowhere := os.open(os.devnull, os.O_WRONLY), self.fileno())
                    os.close(nowhere)
            from rondo.runtime.records.telling import PROCESS

            PROCESS.failed(self.what, error, logs=False)  # a log would be written to such a stream itself
            return memoryview(data).nbytes


def guard_streams() -> None:
    """Make stdout and stderr of this process streams that never raise OSError. Standard descriptors that are closed lead nowhere
    from now on, else the next file that is opened would take their place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for fd, what in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, what)
        if old is getattr(sys, f"__{what}__"):  # else somebody has put another one in its place, such as a test
            encoding, errors = (old.encoding, old.errors) if old is not None else ("utf-8", "backslashreplace")
            by_line = what == "stderr" or (old is not None and (old.line_buffering or old.write_through))
            raw = io.BufferedWriter(_Stream(fd, what))
            setattr(sys, what, io.TextIOWrapper(raw, encoding, errors, line_buffering=by_line))
