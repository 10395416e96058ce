"""The coordinator's journal: every transition, on disk before its effect leaves the process.

Owns files and framing, not meaning. One line an event: eight hex digits of CRC-32, a space, JSON, newline, appended with one
`write(2)` (no fsync: the page cache survives any process; checkpoints survive the node).

Invariant: what a reader gets is a prefix of what was appended; a torn last line (a process killed inside `write`) is cut off
before the next append. A new file (`00000002.journal`) begins with a snapshot event, so replay starts at the newest file.

    with Journal.open(folder) as journal:
        for event in journal.replay(): index.apply(event)
        journal.append([{"event": "admit", "group": 0, "step": 0, "position": 0}])
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from rondo.comm import formats
from rondo.runtime.errors import CorruptData

Event = dict[str, Any]


def encode(event: Event) -> bytes:
    body = orjson.dumps(event)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> Event | None:
    """The event of one line, or None when the line is torn."""
    if len(line) < 10 or line[-1:] != b"\n":
        return None
    body = line[9:-1]
    try:
        matches = int(line[:8], 16) == zlib.crc32(body)
    except ValueError:
        return None
    return orjson.loads(body) if matches else None


def files(folder: Path) -> list[Path]:
    """All journal files of a run, oldest first."""
    return sorted(folder.glob("*.journal"))


def _scan(path: Path) -> Iterator[tuple[Event, int]]:
    """Events of one file, each with the number of bytes of its line."""
    with path.open("rb") as file:
        lines = iter(file)
        for number, line in enumerate(lines, 1):
            event = decode(line)
            if event is None:
                if next(lines, None) is not None:
                    raise CorruptData(
                        f"journal {path} line {number} must match its checksum, got {line[:40]!r}. "
                        "Resume from a checkpoint; the file was changed after it was written."
                    )
                return
            yield event, len(line)


def read(path: Path) -> Iterator[Event]:
    """Events of one file, in today's form whichever release wrote them. A torn last line ends it; a broken line before the last
    raises CorruptData, one of a newer release ConfigError."""
    number = formats.FORMAT
    for event, _ in _scan(path):
        if event["event"] == "snapshot":
            number = formats.format_of(event["state"], f"journal {path}")
        yield formats.event_of(event, number)


class Journal:
    """Append-only writer over the newest file of a folder; one process writes at a time (the coordinator)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        existing = files(folder)
        self.path = existing[-1] if existing else folder / "00000001.journal"
        self.num_events = 0
        self._cut_torn_tail()
        self._fd = self._open(self.path)

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _cut_torn_tail(self) -> None:
        if self.path.exists():
            os.truncate(self.path, sum(num_bytes for _, num_bytes in _scan(self.path)))

    @property
    def empty(self) -> bool:
        return self.path.stat().st_size == 0

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
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise
        self.num_events += len(lines)

    def rotate(self, snapshot: Event) -> Path:
        """Start the next file with `snapshot` as its first event; complete before it takes the old one's place."""
        path = self.folder / f"{int(self.path.stem) + 1:08d}.journal"
        aside = path.with_suffix(".tmp")
        aside.write_bytes(encode(snapshot))
        aside.rename(path)
        os.close(self._fd)
        self.path, self._fd = path, self._open(path)
        return path

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
