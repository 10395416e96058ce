"""Place: which machine, which start of it and which batch job a process runs in; and how often its kernel ran out of memory.

Owns these reads of /proc and the environment, which a run writes down so that its end can be told. Judges nothing.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def place() -> dict[str, Any]:
    """Where this process runs: `boot_id` is another one after each start of the machine; `slurm_job` None outside of one."""
    boot_id = read(_PROC / "sys/kernel/random/boot_id")
    return {"host": platform.node(), "boot_id": boot_id, "slurm_job": os.environ.get("SLURM_JOB_ID")}


def oom_kills() -> int | None:
    """How many processes this machine's kernel has killed for memory since it started; None where it does not tell."""
    lines = read(_PROC / "vmstat").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def read(file: Path) -> str:
    """What a file of the kernel's says; empty where there is none."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
