"""Memory that a server's torch opens by name: POSIX shared memory in the layout of torch's own `file_system` sharing.

torch would do this itself, with a helper process (`torch_shm_manager`) beside ours that keeps our standard output open and
outlives us; its other way of sharing, by descriptors, fails between processes that no common parent started, and ends the server.
So the block is made here, and only the server's torch has a helper.

    byte 0: int32, how many use it     byte 64: num_bytes of data

The reader counts itself in and out, and removes the name when nobody is left: the count starts far above zero and is no
concern of ours. The name lasts as long as the block, which is made for one update, and belongs to whoever holds the lock on the
file: names that a killed process left behind are removed by the next block that is made.

    with SharedBytes(num_bytes) as block:
        block.tensor[:4] = ...                # uint8 [num_bytes]
        post(shared_memory_payload(bucket, block.handle))
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from rondo.runtime.errors import OutOfSpace

FOLDER = Path("/dev/shm")
_PREFIX = "rondo_weights_"
_HEADER_BYTES = 64
_MANY = 1 << 24


class SharedBytes:
    """`tensor`: uint8 [num_bytes]; `handle`: the name by which others open it, "/rondo_weights_...". A context manager."""

    def __init__(self, num_bytes: int) -> None:
        _sweep()
        self.num_bytes = num_bytes
        total = _HEADER_BYTES + num_bytes
        self._file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._file, 0, total)  # now, instead of a SIGBUS in the middle of a copy
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._memory = mmap.mmap(self._file, total)
            self._memory[:4] = _MANY.to_bytes(4, "little")
        except OSError as error:
            os.close(self._file)
            raise OutOfSpace(
                f"{FOLDER} must have room for {total} bytes of weights, got {error}. Make rollout.sglang.bucket_bytes smaller"
            ) from error
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_HEADER_BYTES, count=num_bytes)
        self._path = FOLDER / f"{_PREFIX}{os.getpid()}_{secrets.token_hex(4)}"
        # With a folder's descriptor, which an absolute path does not use, Python follows the link to the unnamed file.
        os.link(f"/proc/self/fd/{self._file}", self._path, src_dir_fd=self._file, follow_symlinks=True)
        self.handle = f"/{self._path.name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)  # the helper of a server that died has removed it already
        del self.tensor
        os.close(self._file)


def _sweep() -> None:
    """Remove the names of processes that were killed: nobody has the lock on these files."""
    for path in FOLDER.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(file)
