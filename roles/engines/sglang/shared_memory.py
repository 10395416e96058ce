"""What has a name in shared memory: weights on their way to a server, and what a server's processes leave when they are killed.

A name in /dev/shm outlives a process that is killed, its lock does not: what is ours lies in a file, or is told by one, that its
owner keeps locked from the first moment, and that whoever comes next removes when nobody does.

    /dev/shm/rondo_weights_7_41c0                      a block: int32 at byte 0, how many use it; the data from byte 64 on
    /dev/shm/rondo_server_7_1f2e                       of a server, as long as it may live; holds the pids of its processes, and:
    /dev/shm/sglang_loads_c0ffee_5e4d.shm              a file of theirs that nobody else could know for the server's
    /dev/shm/sem.rondo_server_7_1f2e-k2j4              a semaphore of its processes, which begin their names so
    /dev/shm/sgl_shm_mm_4711_8c1d                      a block with media on their way, that its process 4711 made

    with SharedBytes(num_bytes) as block:
        block.tensor[:4] = ...                         # uint8 [num_bytes]
        post(shared_memory_payload(bucket, block.handle))

    names = SharedNames()                              # also ends what servers left that were killed with their rollout process
    command = [python, *names.begin, "sglang.launch_server", ...]
    names.saw([4711, 4712], ["sglang_loads_c0ffee_5e4d.shm"])
    names.remove()                                     # no process of the server lives

A block is in the layout of torch's own `file_system` sharing, which a server opens by name. torch would make it itself, with a
helper process (`torch_shm_manager`) beside ours that keeps our standard output open and outlives us; its other way of sharing, by
descriptors, fails between processes that no common parent started, and ends the server. So the block is made here, and only the
server's torch has a helper. The reader counts itself in and out, and removes the name when nobody is left: the count starts far
above zero and is no concern of ours.

Invariant: a name is removed only when it is ours by its own words, and the lock says that its owner is gone; a block of a
server's process besides only when that is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from rondo.runtime.errors import OutOfSpace
from rondo.runtime.processes.process import stat

FOLDER = Path("/dev/shm")
_WEIGHTS, _SERVER = "rondo_weights_", "rondo_server_"
_HEADER_BYTES = 64
_MANY = 1 << 24
_BEGIN = (
    "import multiprocessing.process as own, runpy, sys; own.current_process()._config['semprefix'] = sys.argv.pop(1); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""As `-m`, in a process whose semaphores, and those of all it starts, are named as its first argument says."""


class SharedBytes:
    """`tensor`: uint8 [num_bytes]; `handle`: the name by which others open it, "/rondo_weights_...". A context manager, for one
    update. Raises OutOfSpace."""

    def __init__(self, num_bytes: int) -> None:
        for left, _ in _abandoned(_WEIGHTS):
            left.unlink(missing_ok=True)
        total = _HEADER_BYTES + num_bytes
        self._file = _unnamed()
        try:
            os.posix_fallocate(self._file, 0, total)  # now, instead of a SIGBUS in the middle of a copy
            memory = mmap.mmap(self._file, total)
            memory[:4] = _MANY.to_bytes(4, "little")
        except OSError as error:
            os.close(self._file)
            raise OutOfSpace(
                f"{FOLDER} must have room for {total} bytes of weights, got {error}. Make rollout.sglang.bucket_bytes smaller"
            ) from error
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES, count=num_bytes)
        self._path = _give_name(self._file, _WEIGHTS)
        self.handle = f"/{self._path.name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)  # the helper of a server that died has removed it already
        del self.tensor
        os.close(self._file)


class SharedNames:
    """Those of one server, from before its start until its end."""

    def __init__(self) -> None:
        for path, file in _abandoned(_SERVER):
            _remove(path, os.pread(file, 1 << 16, 0).decode().split())
        self._file = _unnamed()
        self._path = _give_name(self._file, _SERVER)
        self._seen: set[str] = set()

    @property
    def begin(self) -> tuple[str, ...]:
        """Of a Python's command line, before the module that it runs."""
        return "-c", _BEGIN, f"/{self._path.name}"

    def saw(self, pids: Iterable[int], files: Iterable[str] = ()) -> None:
        """These are processes of the server, and files that they have made."""
        self._seen.update(map(str, pids), files)
        os.pwrite(self._file, " ".join(sorted(self._seen)).encode(), 0)

    def remove(self) -> None:
        """All of them; once."""
        _remove(self._path, self._seen)
        os.close(self._file)


def _remove(owner: Path, seen: Iterable[str]) -> None:
    found = list(FOLDER.glob(f"sem.{owner.name}-*"))
    for each in seen:
        if not each.isdigit():
            found.append(FOLDER / Path(each).name)
            continue
        now = stat(pid := int(each))
        # A live one is another process by now, with the same number; a zombie only waits for its parent to ask how it ended.
        if now is None or not now.alive:
            found += FOLDER.glob(f"sgl_shm_*_{pid}_*")
    for path in (*found, owner):
        path.unlink(missing_ok=True)


def _unnamed() -> int:
    """A descriptor of a new file without a name, which this process owns until it closes it. OSError where there is no room."""
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _give_name(file: int, prefix: str) -> Path:
    """A name that begins so; to be removed by its owner."""
    path = FOLDER / f"{prefix}{os.getpid()}_{secrets.token_hex(4)}"
    # With a folder's descriptor, which an absolute path does not use, Python follows the link to the unnamed file.
    os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file, follow_symlinks=True)
    return path


def _abandoned(prefix: str) -> Iterator[tuple[Path, int]]:
    """(path, descriptor) of those with such names whose owner is dead; locked, and closed afterwards."""
    for path in FOLDER.glob(f"{prefix}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path, file
        except BlockingIOError:
            continue
        finally:
            os.close(file)
