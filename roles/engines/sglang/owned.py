"""Files in shared memory that have an owner: whoever holds the lock on them.

A name in /dev/shm outlives a process that is killed, its lock does not. Owns how such a file comes to its name, locked from the
first moment, and how those are found whose owner is dead. Does not own what is in them.

    file = unnamed()                        # a descriptor; fill it
    path = give_name(file, "rondo_weights_")
    for path, file in abandoned("rondo_weights_"): path.unlink(missing_ok=True)
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")


def unnamed() -> int:
    """A descriptor of a new file without a name, which this process owns until it closes it. OSError where there is no room."""
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def give_name(file: int, prefix: str) -> Path:
    """A name that begins so; to be removed by its owner."""
    path = FOLDER / f"{prefix}{os.getpid()}_{secrets.token_hex(4)}"
    # With a folder's descriptor, which an absolute path does not use, Python follows the link to the unnamed file.
    os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file, follow_symlinks=True)
    return path


def abandoned(prefix: str) -> Iterator[tuple[Path, int]]:
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
