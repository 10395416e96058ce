"""Machine: what of this computer a run may use. Imports nothing heavy.

Owns four questions: how many cores, which parts, is a port free, can files be made in a folder. How much memory is free is
`rondo.runtime.memory.free`'s.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.runtime.errors import ConfigError


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """What this computer is, as far as the kernel tells without being measured: a part that it does not tell is left out."""
    nvidia = Path("/proc/driver/nvidia")
    told = {
        "processor": fields_of(Path("/proc/cpuinfo")).get("model name"),
        "memory": fields_of(Path("/proc/meminfo")).get("MemTotal"),
        "driver": fields_of(nvidia / "version").get("NVRM version"),
        "devices": [fields_of(each).get("Model") for each in sorted(nvidia.glob("gpus/*/information"))],
    }
    return {"host": platform.node()} | {name: value for name, value in told.items() if value}


def fields_of(file: Path) -> dict[str, str]:
    """What the lines `name: value` of a file of /proc say, of equal names the first; nothing where it cannot be read."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}


def said_by(command: Sequence[str], limit_s: float, folder: Path | None = None) -> str | None:
    """What a program says; None where there is none, or it fails or takes longer."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


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
    """Return why files cannot be made in a folder, which may not exist yet; None if they can. Tries a file without a name."""
    for found in (path, *path.absolute().parents):
        if os.path.lexists(found):
            if not found.is_dir():
                return f"{found} is {'a file' if found.exists() else 'a link to nothing'}"
            try:
                with tempfile.TemporaryFile(dir=found):
                    return None
            except OSError as error:
                return f"{found} takes no files: {error.strerror}"
    raise ConfigError(f"{path} must have a parent folder, got none. Check the path")
