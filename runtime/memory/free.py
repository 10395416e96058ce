"""Memory: how much of it is free for this run on this machine. Reads /proc and /sys; imports nothing heavy.

Owns that one figure, which `rondo check` and whoever hands memory out (`segments.py`) both judge by. A control group's limit
counts, for containers and batch jobs, before the machine's own memory does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rondo.runtime.processes.place import read

_ROOT = Path("/")


class _Files(NamedTuple):
    """Where a version of control groups tells a limit and what counts towards it, and in memory.stat, what is given back
    where memory is short: cached files. Shared memory, though it is a file, is not among them."""

    base: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


_V1 = _Files(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def free_memory_bytes(root: Path = _ROOT) -> tuple[int, str]:
    """The bytes that processes may still take, and what limits them: "the cgroup" or "the machine".

    The least of what is left in this process's control groups and their parents (version 1 and 2), and MemAvailable.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = min((left for left in _left_in_groups(root) if left is not None), default=machine)
    return (max(0, group), "the cgroup") if group < machine else (machine, "the machine")


def _left_in_groups(root: Path) -> Iterator[int | None]:
    """From the innermost group out; None where there is no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        # Inside a container the path is the host's, and the container's own group is mounted at the base.
        base = root / files.base
        folder = base / inside.strip("/")
        while folder != base:
            yield _left(folder, files)
            folder = folder.parent
        yield _left(base, files)


def _left(folder: Path, files: _Files) -> int | None:
    limit = read(folder / files.limit)
    if limit in ("", "max"):
        return None
    stat = dict(line.split(" ", 1) for line in read(folder / "memory.stat").splitlines())
    used = int(read(folder / files.used) or 0)
    return int(limit) - max(0, used - sum(int(stat.get(name, 0)) for name in files.reclaimable))
