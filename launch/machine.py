"""Machine: how much of this computer a run may use. Reads /proc and /sys; imports nothing heavy.

Owns three questions: how many cores, how much memory, is a port free. A control group's limit counts, for containers
and batch jobs, before the machine's own memory does.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rondo.runtime.errors import ConfigError

_ROOT = Path("/")


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_limit_bytes(root: Path = _ROOT) -> tuple[int, str]:
    """The bytes of memory that this process may use, and what limits them: "the cgroup" or "the machine".

    The smallest limit among the process's control groups and their parents (version 1 and 2), and MemTotal.
    """
    total = next(
        int(line.split()[1]) * 1024
        for line in (root / "proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limits = [limit for folder, file in _memory_groups(root) if (limit := _limit(folder / file)) is not None]
    smallest = min(limits, default=total)
    return (smallest, "the cgroup") if smallest < total else (total, "the machine")


def port_problem(host: str, port: int) -> str | None:
    """Why a port cannot be listened on, in the system's words; None when it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def show_bytes(num_bytes: int) -> str:
    """Bytes for a reader: "512 bytes", "11 KiB", "64 MiB", "1.5 GiB"."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 10):.0f} KiB" if num_bytes >= 1 << 10 else f"{num_bytes} bytes"


def folder_problem(path: Path) -> str | None:
    """Why files cannot be made in a folder (which may not exist yet); None when they can."""
    for found in (path, *path.absolute().parents):
        if found.exists():
            if not found.is_dir():
                return f"{found} is a file"
            return None if os.access(found, os.W_OK | os.X_OK) else f"no permission to write to {found}"
    raise ConfigError(f"{path} must have a parent folder, got none. Check the path")


def _memory_groups(root: Path) -> list[tuple[Path, str]]:
    """Folders of the memory control groups of this process, from the innermost out, with the limit's file name."""
    found: list[tuple[Path, str]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path is the host's, and the container's own group is mounted at the base.
        folder = base / inside.strip("/")
        while folder != base:
            found.append((folder, file))
            folder = folder.parent
        found.append((base, file))
    return found


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
