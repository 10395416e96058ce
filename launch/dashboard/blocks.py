"""Blocks: an index on the disk, appended to as what it is of grows; whoever cannot write it, or finds it in use, does without.

Owns the form of the file and the lock on it. Does not own what an index holds. A block is one JSON line, of which "bytes" and
"crc" are ours, and raw bytes behind it. Invariants: only whole blocks are read; a torn one, and all behind it, is cut off; one
process writes at a time, others keep what they would write in memory; nothing is written through a link.

    blocks = Blocks(run / FOLDER / "metrics")
    for head, data in blocks.read(): ...
    blocks.append({"offset": 4096}, column.tobytes())
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

FOLDER = "index"
"""In the run directory."""
_MOST_BYTES = 1 << 30


class Blocks:
    """Of one file, opened at the first look. `close` lets go of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def read(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The whole blocks in order; nothing where the file is in use or cannot be written."""
        if not self._open():
            return
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            end = 0
            while (block := _next(file.readline(), file.read)) is not None:
                end = file.tell()
                yield block
        os.ftruncate(self._fd, end)

    def append(self, head: Mapping[str, Any], data: bytes) -> None:
        """One more block; a disk that does not take it is done without from here on."""
        if self._fd >= 0:
            line = orjson.dumps({**head, "bytes": len(data), "crc": zlib.crc32(data)}, option=orjson.OPT_APPEND_NEWLINE)
            written = 0
            with contextlib.suppress(OSError):
                written = os.write(self._fd, line + data)
            if written != len(line) + len(data):  # what is torn is cut off by the next reader
                self.close()

    def clear(self) -> None:
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                fd = open_own(self._path, os.O_APPEND)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:  # another dashboard has it
                    os.close(fd)
                else:
                    self._fd = fd
        return self._fd >= 0


def open_own(path: Path, flags: int = 0) -> int:
    """A file of mode 0600 to read and write, made where there is none. OSError where it, or its folder, is a link or another
    user's: who looks at a run of others must not be led to write elsewhere."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(
            path.name,
            flags | os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o600,
            dir_fd=folder,
        )
        told, owners = os.fstat(fd), {os.fstat(each).st_uid for each in (folder, fd)}
        if owners != {os.geteuid()} or not stat.S_ISREG(told.st_mode) or told.st_nlink != 1:
            os.close(fd)
            raise PermissionError(f"{path} must be a file of this user alone")
        os.fchmod(fd, 0o600)
        return fd
    finally:
        os.close(folder)


def _next(line: bytes, read: Any) -> tuple[dict[str, Any], bytes] | None:
    """A block whose line this is, None where it is not whole."""
    try:
        head = orjson.loads(line)
        size, crc = head["bytes"], head["crc"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    if not isinstance(size, int) or not 0 <= size <= _MOST_BYTES:
        return None
    data = read(size)
    return (head, data) if len(data) == size and zlib.crc32(data) == crc else None
