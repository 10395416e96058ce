"""Files of users' rows: a file as it was when it was opened, and files that are made of it once and kept in a cache.

Owns the descriptor that outlives a rename, and the cache. Does not own what a file holds (`lines.py`, `sources.py`).

    file = File(Path("train.jsonl.gz"))
    derived(file, ".unpacked", lambda out: ...)  ->  ~/.cache/rondo/data/5d1c...-93f0....unpacked

Invariant: a derived file belongs to one state of its file (device, inode, size and times); files of earlier states are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

_ABANDONED_S = 3600.0
"""Age after which an unfinished file belongs to a process that was killed."""


class File:
    """A file as it was when this was made. Threads may read it beside each other.

    keep: whether a descriptor stays open, through which the file can be read after it was replaced or removed."""

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if keep else None
        self.accept()
        if self._fd is not None:
            weakref.finalize(self, os.close, self._fd)

    def accept(self) -> None:
        """From now on it is the same as long as it stays as it is."""
        self._state = self._look()

    @property
    def num_bytes(self) -> int:
        """When it was last accepted."""
        return self._state[1]

    def read(self, start: int, end: int) -> tuple[bytes, bool]:
        """(bytes, whether nobody has written to the file). OSError for a file that was closed in between and is gone."""
        fd = self._fd if self._fd is not None else os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.pread(fd, end - start, start)
        finally:
            if self._fd is None:
                os.close(fd)
        return text, self.is_same()

    def is_same(self) -> bool:
        """Whether nobody has written to it. OSError as `read`."""
        return self._look() == self._state

    def current_path(self) -> Path:
        """Where this very file can be opened, also when another one has its name by now."""
        return self.path if self._fd is None else Path(f"/proc/self/fd/{self._fd}")

    def _look(self) -> tuple[int, int, int]:
        found = self.path.stat() if self._fd is None else os.fstat(self._fd)
        return found.st_ino, found.st_size, found.st_mtime_ns


def derived(
    file: File, suffix: str, write: Callable[[IO[bytes]], None], is_whole: Callable[[Path], bool] = Path.is_file
) -> Path:
    """Return the path of what `write` makes of the file as it is now; it is called where the cache has no such file yet.

    Processes that need the same one at once wait for the first of them. OSError where it cannot be written."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondo" / "data"
    except RuntimeError as error:
        raise OSError(0, "there is no home directory") from error
    status = file.current_path().stat()
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    of_path, of_state = (
        hashlib.blake2b(str(part).encode(), digest_size=12).hexdigest() for part in (file.path.resolve(), state)
    )
    path = cache / f"{of_path}-{of_state}{suffix}"
    if is_whole(path):
        return path
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (cache / f"{of_path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole(path):
            _write(path, file, write)
    for other in cache.glob(f"{of_path}-*"):
        with contextlib.suppress(FileNotFoundError):
            is_abandoned = time.time() - other.stat().st_mtime > _ABANDONED_S
            if other != path and (other.suffix == suffix or (other.suffix == ".part" and is_abandoned)):
                other.unlink()
    return path


def _write(path: Path, file: File, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file under another name first, so that nobody reads one that is not whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False) as out:
        try:
            write(out)
            out.close()
            if not file.is_same():
                raise OSError(0, "the file is being written to")
            Path(out.name).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(out.name).unlink()
            raise
