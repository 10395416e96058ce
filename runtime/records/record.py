"""Record: what a run writes down while it lasts. JSONL files, files that are whole or not there, and log lines of `key=value`.

Owns the form of a line, that it begins on a line of its own, and reading lines back. Does not own what is worth a line.
Invariants: one record is one `write(2)` with O_APPEND, so records of several processes never mix and a killed writer leaves
whole lines; a line that a power loss or a full disk tore is ended before the next one, and left out by every reader, as are empty
lines; a file that cannot be written is counted and told (`telling.py`), never raised.

    with JsonLines(run / "events.jsonl") as events:
        events.write({"kind": "died", "group": "actor-0"})      # {"time":1760000000.5,"kind":"died","group":"actor-0"}
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.closing import Closing
from rondo.runtime.records.telling import telling

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


log = logging.getLogger("rondo.record")


class JsonLines(Closing):
    """Appends records to a file, opened at the first. `clock` gives the seconds since the epoch for the "time" of a record
    without one; `what` names it where it cannot be written, the file's name by default."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, what: str = "") -> None:
        self.path = path
        self._what = what or path.name
        self._clock = clock
        self._fd = -1
        self._torn = False

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Appends one record and returns it with its time, also where the file cannot take it."""
        timed = {"time": self._clock(), **record}
        with telling(self._what):
            self._append(orjson.dumps(timed, default=str, option=_OPTIONS))
        return timed

    def _append(self, line: bytes) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:  # somebody removed it
            self.close()
        if self._fd < 0:
            self._open()
        data = b"\n" + line if self._torn else line
        written = os.write(self._fd, data)
        self._torn = written != len(data)
        if self._torn:
            raise OSError(f"a record must be written whole to {self.path}, got {written} of {len(data)} bytes")

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(lines: Iterable[bytes], path: Path, fits: Callable[[Any], bool] = lambda value: True) -> Iterator[Any]:
    """What the whole lines of a JSON Lines file hold. A last line without its end may still be written, and is left out;
    so are lines that were torn, or whose value does not fit, with a warning that counts them."""
    num_torn = num_unfit = 0
    for line in lines:
        if not line.endswith(b"\n") or line.isspace():
            continue
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            num_torn += 1
            continue
        if fits(found):
            yield found
        else:
            num_unfit += 1
    if num_torn:
        log.warning("%s has %d torn lines, which are left out", path, num_torn)
    if num_unfit:
        log.warning("%s has %d lines of another shape than a record, which are left out", path, num_unfit)


def pairs(fields: Mapping[str, object]) -> str:
    """`key=value` text. Texts with spaces, quotes or nothing in them are quoted; floats have six digits."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


class KeyValueFormatter(logging.Formatter):
    """One line a record: time, level, logger, the process's own fields, the message, then `extra={"fields": {...}}`."""

    def __init__(self, process_fields: Mapping[str, object]) -> None:
        super().__init__()
        self._process_fields = pairs(process_fields)

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        parts = [f"time={moment}.{record.msecs:03.0f}", f"level={record.levelname.lower()}", f"logger={record.name}"]
        parts += [self._process_fields, f"message={_value(record.getMessage())}"]
        parts.append(pairs(getattr(record, "fields", {})))
        line = " ".join(part for part in parts if part)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def log_to_stderr(process_fields: Mapping[str, object]) -> None:
    """Sends this process's log to stderr as `key=value` lines; whoever started the process keeps stderr in a file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(process_fields))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """The whole file or none, also where the power fails: aside first, flushed, then renamed over what was there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def last_lines(path: Path, num_lines: int = 30, num_bytes: int = 64 * 1024) -> tuple[str, ...]:
    """The end of a log, for the report of a failure; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return lines_of(file.read(num_bytes), num_lines)
    except OSError:
        return ()


def lines_of(data: bytes, num_lines: int) -> tuple[str, ...]:
    """The last lines of a text that are not empty."""
    return tuple(line for line in data.decode(errors="replace").splitlines() if line.strip())[-num_lines:]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if not text or any(character.isspace() or character in "\"'=" for character in text):
        return orjson.dumps(text).decode()
    return text
