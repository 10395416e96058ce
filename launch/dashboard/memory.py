"""Memory: what the processes of a live run hold now, and its devices, as the kernel and the driver say.

Owns the reading of /proc and of `nvidia-smi`, in the dashboard's process: the run does nothing for it. Does not own what was held
before: a run records it in metrics.jsonl (`runtime/records/ledger.py`) and, at its end, its peaks in the summary. Of a run whose
processes are on another machine nothing is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rondo.launch.machine import fields_of, said_by

_FIELDS = {"VmRSS": "rss_bytes", "RssAnon": "own_bytes", "RssShmem": "shared_bytes", "VmHWM": "peak_bytes"}
_ANSWER_S = 3.0
_MIB = 1 << 20


def held(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record for each worker of the `groups` of /roles: its name, pid, and bytes of each kind, as far as they are known."""
    found = []
    for group in groups:
        for rank, pid in enumerate(group.get("pids", ())):
            told = fields_of(Path(f"/proc/{pid}/status"))
            kinds = {_FIELDS[name]: int(told[name].split()[0]) << 10 for name in _FIELDS if name in told}
            found.append({"name": f"{group['name']}.{rank}", "pid": pid, **kinds})
    return found


def devices() -> list[dict[str, Any]]:
    """Every device of this machine: its name, bytes used and there, how busy it is (percent), and bytes by pid; none without a
    driver that answers."""
    gpus = ask_driver("gpu", "uuid,index,name,memory.used,memory.total,utilization.gpu")
    used = ask_driver("compute-apps", "gpu_uuid,pid,used_gpu_memory") if gpus else []
    return [
        {
            "index": index, "name": name, "used_bytes": _mib(taken), "bytes": _mib(there), "busy": _whole(busy),
            "by_pid": {pid: _mib(mib) for of, pid, mib in used if of == uuid},
        }
        for uuid, index, name, taken, there, busy in gpus
    ]  # fmt: skip


def ask_driver(what: str, fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-WHAT=FIELDS`; none without one that answers."""
    text = said_by(["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"], _ANSWER_S) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _mib(text: str) -> int | None:
    """None where the driver does not say ("[N/A]")."""
    return None if (found := _whole(text)) is None else found * _MIB
