"""Memory that a server's torch opens by name: POSIX shared memory in the layout of torch's own `file_system` sharing.

torch would do this itself, with a helper process (`torch_shm_manager`) beside ours that keeps our standard output open and
outlives us; its other way of sharing, by descriptors, fails between processes that no common parent started, and ends the server.
So the block is made here, and only the server's torch has a helper.

    byte 0: int32, how many use it     byte 64: num_bytes of data

The reader counts itself in and out, and removes the name when nobody is left: the count starts far above zero and is no
concern of ours. The name lasts as long as the block, which is made for one update, and has an owner (`owned.py`): names that a
killed process left behind are removed by the next block that is made.

    with SharedBytes(num_bytes) as block:
        block.tensor[:4] = ...                # uint8 [num_bytes]
        post(shared_memory_payload(bucket, block.handle))
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Self

import torch

from rondo.roles.engines.sglang.owned import FOLDER, abandoned, give_name, unnamed
from rondo.runtime.errors import OutOfSpace

_PREFIX = "rondo_weights_"
_HEADER_BYTES = 64
_MANY = 1 << 24


class SharedBytes:
    """`tensor`: uint8 [num_bytes]; `handle`: the name by which others open it, "/rondo_weights_...". A context manager."""

    def __init__(self, num_bytes: int) -> None:
        for abandoned_path, _ in abandoned(_PREFIX):
            abandoned_path.unlink(missing_ok=True)
        self.num_bytes = num_bytes
        total = _HEADER_BYTES + num_bytes
        self._file = unnamed()
        try:
            os.posix_fallocate(self._file, 0, total)  # now, instead of a SIGBUS in the middle of a copy
            self._memory = mmap.mmap(self._file, total)
            self._memory[:4] = _MANY.to_bytes(4, "little")
        except OSError as error:
            os.close(self._file)
            raise OutOfSpace(
                f"{FOLDER} must have room for {total} bytes of weights, got {error}. Make rollout.sglang.bucket_bytes smaller"
            ) from error
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_HEADER_BYTES, count=num_bytes)
        self._path = give_name(self._file, _PREFIX)
        self.handle = f"/{self._path.name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)  # the helper of a server that died has removed it already
        del self.tensor
        os.close(self._file)
