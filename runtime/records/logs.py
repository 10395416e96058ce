"""Logs: what child processes write to stdout and stderr, in files of bounded size.

    with LOGS.open(path) as fd:
        subprocess.Popen(command, stdout=fd, stderr=subprocess.STDOUT)
    last = LOGS.last_lines(path)            # all that was written by now, also where the disk has taken none of it

A child gets the end of a pipe, and a thread of this process writes what comes out of it. Owns pipes, files and their limit. Does
not own who writes. What a child starts has the same pipe.

Invariants: a file keeps its first `HEAD_BYTES` and its last `TAIL_BYTES` or more, has at most `MOST_BYTES`, and says how much
was left out in between; a file that cannot be made or written costs its lines alone, and is counted (`telling.py`): no child
sees an error of a disk.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

from rondo.runtime.records.record import last_lines, lines_of
from rondo.runtime.records.telling import PROCESS

HEAD_BYTES, TAIL_BYTES, MOST_BYTES = 2 << 20, 4 << 20, 8 << 20
_PIPE_BYTES = 1 << 16
"""A child that is further ahead waits."""
_HELD_BYTES = 64 << 10
_MOST_ENDED = 64
"""Logs whose last lines are in memory although nobody writes to them any more."""


class _Log:
    """One file, and the end of what was written to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pipes: set[int] = set()
        self.last = bytearray()
        self._fd = -1
        self._num_lost = self._num_left_out = 0
        self._mark = b""

    def write(self, data: bytes) -> None:
        self.last += data
        del self.last[:-_HELD_BYTES]
        try:
            self._append(data)
        except OSError as error:
            self._num_lost += len(data)
            PROCESS.failed("logs", error)
        else:
            PROCESS.worked("logs")

    def _append(self, data: bytes) -> None:
        if self._fd < 0 or os.fstat(self._fd).st_nlink == 0:  # somebody removed it
            self.close()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not data:
            return
        if self._num_lost:
            data = b"\n... %d bytes left out: they could not be written ...\n" % self._num_lost + data
        at = os.fstat(self._fd).st_size
        if at + len(data) > MOST_BYTES:
            at = self._cut(at)
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._fd, rest, at)
            rest, at = rest[written:], at + written
        self._num_lost = 0

    def _cut(self, size: int) -> int:
        """Leaves out what lies between the head and the tail, in place, so that it takes no room; the size then."""
        tail = os.pread(self._fd, TAIL_BYTES, size - TAIL_BYTES)
        tail = tail[tail.find(b"\n") + 1 :]
        self._num_left_out += size - HEAD_BYTES - len(self._mark) - len(tail)
        self._mark = b"\n... %d bytes left out ...\n" % self._num_left_out
        os.pwrite(self._fd, self._mark + tail, HEAD_BYTES)
        os.ftruncate(self._fd, HEAD_BYTES + len(self._mark) + len(tail))
        return HEAD_BYTES + len(self._mark) + len(tail)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Logs:
    """The logs of what one process starts. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_path: dict[Path, _Log] = {}
        self._of_pipe: dict[int, _Log] = {}
        self._ready: select.epoll | None = None

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """A descriptor for the stdout and stderr of children that are started in the body. OSError where there is none."""
        pipe, end = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(pipe, False)
            with self._lock:
                self._listen(pipe, path)
        except BaseException:
            os.close(pipe)
            os.close(end)
            raise
        try:
            yield end
        finally:
            os.close(end)

    def last_lines(self, path: Path, num_lines: int = 30) -> tuple[str, ...]:
        """The end of a log, with all that its processes have written by now; of one that is not of this process, as its file has
        it."""
        with self._lock:
            log = self._of_path.get(path)
            if log is None:
                return last_lines(path, num_lines)
            self._read(log)
            return lines_of(bytes(log.last), num_lines)

    def settle(self) -> None:
        """Writes down all that children have written by now."""
        with self._lock:
            for log in list(self._of_path.values()):
                self._read(log)

    def _listen(self, pipe: int, path: Path) -> None:
        if self._ready is None:
            self._ready = select.epoll()
            threading.Thread(target=self._run, args=(self._ready,), name="logs", daemon=True).start()
        self._ready.register(pipe, select.EPOLLIN)
        log = self._of_path.pop(path, None) or _Log(path)
        self._of_pipe[pipe] = self._of_path[path] = log  # as the newest
        log.pipes.add(pipe)
        log.write(b"")  # the file is there from the start: its name tells that this process has been
        for ended in [each for each in self._of_path.values() if not each.pipes][:-_MOST_ENDED]:
            del self._of_path[ended.path]

    def _run(self, ready: select.epoll) -> None:
        while True:
            for pipe, _ in ready.poll():
                with self._lock:
                    if pipe in self._of_pipe:
                        self._read_once(pipe)

    def _read(self, log: _Log) -> None:
        for pipe in list(log.pipes):
            for _ in range(4):  # whoever goes on writing is not waited for
                if self._read_once(pipe) == 0:
                    break

    def _read_once(self, pipe: int) -> int:
        log = self._of_pipe[pipe]
        try:
            data = os.read(pipe, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if data:
            log.write(data)
            return len(data)
        del self._of_pipe[pipe]
        log.pipes.discard(pipe)
        assert self._ready is not None
        self._ready.unregister(pipe)
        os.close(pipe)
        if not log.pipes:
            log.close()
        return 0


LOGS = Logs()
"""Of this process."""
