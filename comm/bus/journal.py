"""The coordinator's journal: every transition, on disk before its effect leaves the process.

Owns files and framing, not meaning. One line an event: eight hex digits of CRC-32, a space, JSON, newline, appended with one
`write(2)` (no fsync: the page cache survives any process; checkpoints survive the node). A file that has grown by
`ROTATE_BYTES` is followed by the next one (`00000002.journal`), which begins with a snapshot, is on the disk before it takes its
place, and is all that a run reads. The one before it stays for people who ask what happened last; older ones go. So a run's
journal has the size of two files, however long the run.

Room for the next `RESERVE_BYTES` is taken from the disk ahead, so that a full disk is noticed (`short`) before a line finds none.

Invariant: what a reader gets is a prefix of what was appended; a torn last line (a process killed inside `write`) is cut off
before the next append.

    with Journal(folder) as journal:
        for event in journal.replay(): index.apply(event)
        journal.append([{"event": "admit", "group": 0, "step": 0, "position": 0}])
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.bus import puts
from rondo.runtime import formats
from rondo.runtime.checkpoints import flush
from rondo.runtime.errors import CorruptData

Event = dict[str, Any]
ROTATE_BYTES = 32 << 20
"""Events behind a snapshot, before the next one; more where the snapshot itself is larger. A second or two of replay."""
RESERVE_BYTES = 4 << 20
_LOW_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h


def encode(event: Event) -> bytes:
    body = orjson.dumps(puts.short(event) if "record" in event else event)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def files(folder: Path) -> list[Path]:
    """The journal files of a run, oldest first."""
    return sorted(folder.glob("*.journal"))


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines of one file. A torn last line ends it; a broken line before the last raises CorruptData."""
    with path.open("rb") as file:
        lines = iter(file)
        for number, line in enumerate(lines, 1):
            if not _whole(line):
                if next(lines, None) is not None:
                    raise CorruptData(
                        f"journal {path} line {number} must match its checksum, got {line[:40]!r}. A power failure, or somebody, "
                        "changed the file: `rondo resume` goes on from a checkpoint; without one, train anew in another folder."
                    )
                return
            yield line


def _whole(line: bytes) -> bool:
    try:
        return len(line) >= 10 and line[-1:] == b"\n" and int(line[:8], 16) == zlib.crc32(memoryview(line)[9:-1])
    except ValueError:
        return False


def read(path: Path) -> Iterator[Event]:
    """Events of one file. A torn last line ends it; a broken line before the last raises CorruptData, a snapshot of a release
    that is too new or too old ConfigError."""
    for line in _lines(path):
        event = orjson.loads(line[9:-1])
        if event["event"] == "snapshot":
            formats.check(event["state"], formats.JOURNAL, f"journal {path}", oldest=formats.OLDEST_JOURNAL)
        yield puts.whole(event) if "record" in event else event


class Journal:
    """Append-only writer over the newest file of a folder; one process writes at a time (the coordinator)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        existing = files(folder)
        self.path = existing[-1] if existing else folder / "00000001.journal"
        self.num_events = 0
        self.broken: CorruptData | None = None
        """Why nothing can be appended to the newest file: it is read by nobody, and `rotate` goes on without it."""
        self._open(self.path, snapshot_bytes=0)

    def _open(self, path: Path, snapshot_bytes: int) -> None:
        self.path, self._size, self._reserved = path, 0, 0
        try:
            self._size = sum(map(len, _lines(path))) if path.exists() else 0
        except CorruptData as error:
            self.broken = error
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if self.broken is None:
            os.ftruncate(self._fd, self._size)
        self._rotate_at = max(ROTATE_BYTES, 2 * snapshot_bytes) + self._size
        self._reserve()

    @property
    def empty(self) -> bool:
        return self.path.stat().st_size == 0

    @property
    def due(self) -> bool:
        """Whether the file has grown enough to be followed by the next one."""
        return self._size >= self._rotate_at

    def short(self) -> bool:
        """Whether the disk is full: what is left of the room that was taken ahead is for what must be written now."""
        return self._reserved >= 0 and self._reserved - self._size < _LOW_BYTES and not self._reserve()

    def _reserve(self) -> bool:
        """Take room ahead; False where the disk has none. On file systems that cannot, a full one is noticed in `append`."""
        if self._reserved < 0 or self._reserved - self._size > RESERVE_BYTES // 2:
            return True
        at, num_bytes = ctypes.c_long(self._size), ctypes.c_long(RESERVE_BYTES)
        if _libc().fallocate(self._fd, _KEEP_SIZE, at, num_bytes) == 0:  # the file's end stays where it is
            self._reserved = self._size + RESERVE_BYTES
            return True
        error = ctypes.get_errno()
        if error not in _NO_ROOM:
            self._reserved = -1
        return error not in _NO_ROOM

    def replay(self) -> Iterator[Event]:
        return read(self.path)

    def append(self, events: Iterable[Event]) -> None:
        """Write events with one system call; after it returns they survive this process.

        Raises OSError when there is no room; nothing of them is in the file then, so that they can be written again.
        """
        lines = [encode(event) for event in events]
        data, written = b"".join(lines), 0
        try:
            while written < len(data):  # a short write happens only when there is no room; the next call then raises
                written += os.write(self._fd, data[written:] if written else data)
        except OSError:
            os.ftruncate(self._fd, self._size)
            self._reserved = min(self._reserved, 0)
            raise
        self._size += written
        self.num_events += len(lines)
        self._reserve()

    def rotate(self, snapshot: Event) -> Path:
        """Start the next file with `snapshot` as its first event; whole, and on the disk, before it takes the old one's place.
        The one before that is removed then; a broken one is renamed. OSError when there is no room; the old file goes on then."""
        path = self.folder / f"{int(self.path.stem) + 1:08d}.journal"
        aside, line = path.with_suffix(".tmp"), encode(snapshot)
        try:
            aside.write_bytes(line)
            flush(aside)
            aside.rename(path)
        except OSError:
            aside.unlink(missing_ok=True)
            self._rotate_at = self._size + ROTATE_BYTES // 8
            raise
        flush(self.folder)
        self.close()
        if self.broken is not None:
            self.path.rename(self.path.with_suffix(".broken"))
        self.broken = None
        self._open(path, snapshot_bytes=len(line))
        for old in files(self.folder)[:-2]:
            old.unlink()
        return path

    def close(self) -> None:
        """Nothing more is appended; room that was taken ahead returns."""
        if self.broken is None:
            os.ftruncate(self._fd, self._size)
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
