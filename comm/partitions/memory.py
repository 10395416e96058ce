"""The memory of a partition's rings: segments that the supervisor keeps, or files where a partition spills to disk.

Owns the choice between them by the ring's name, and files of their own kind. Does not own what lies inside (`ring.py`).

    "part/3/writer.0/1"               a segment of the supervisor
    "file:/scratch/part-3-1-8f2c"     a file, every byte of it reserved on the disk before it is mapped

Invariant: readers, writers and the coordinator treat both alike; a file is gone from its folder when its ring is dropped, and
its mappings keep the bytes.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rondo.comm.ring.views import Segments
from rondo.runtime.memory.segments import Segment

FILE = "file:"


class Memories:
    """What `Rings` and readers need of a segment client, for both kinds of memory."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    def segment(self, name: str, num_bytes: int) -> Segment:
        """The memory of this name; made now where `num_bytes` says how large. OSError when the disk is full."""
        if not name.startswith(FILE):
            return self._segments.segment(name, num_bytes)
        path = Path(name.removeprefix(FILE))
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if num_bytes else 0), 0o600)
        try:
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
            return Segment(name, os.fstat(fd).st_size, fd)
        except OSError:
            os.close(fd)
            if num_bytes:
                path.unlink()
            raise

    def doorbell(self, name: str) -> int:
        return self._segments.doorbell(_bell(name))

    def drop(self, name: str) -> None:
        self._segments.drop(_bell(name))
        if name.startswith(FILE):
            unlink(name)


def unlink(name: str) -> None:
    """Take a file out of its folder; mappings keep its bytes."""
    Path(name.removeprefix(FILE)).unlink(missing_ok=True)


def _bell(name: str) -> str:
    """A path may be longer than a doorbell's name."""
    return "part/" + hashlib.blake2b(name.encode(), digest_size=12).hexdigest() if name.startswith(FILE) else name
