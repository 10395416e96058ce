"""`rondo scale` and `rondo restart`: asking a run in another process for another number of replicas, or for new ones.

Owns the client side, and what it prints. Exit codes: 0 begun, or with `wait` done; 1 it did not come to what was asked for;
ConfigError where it cannot be.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rondo.launch.report.status import ask, live_record
from rondo.launch.rundir import SupervisorRecord
from rondo.runtime.errors import ConfigError

_LOOK_S = 0.25
_WELL = ("ACTIVE", "COMPLETED", "NOOP")


def scale(
    role: str,
    num_replicas: int,
    path: Path,
    *,
    reason: str,
    dry_run: bool,
    wait: bool,
    force: bool,
    timeout: float | None,
) -> int:
    """There are to be so many replicas of a role."""
    record = live_record(path, "to be scaled")
    there = ask(record, "/scaling")["replicas"].get(role, ())
    action = "scale_in" if num_replicas < len(there) else "scale_out"
    fields = {"num_replicas": num_replicas, "reason": reason, "dry_run": dry_run, "force": force}
    return _asked(record, role, action, fields, timeout, wait=wait and not dry_run)


def restart(
    roles: list[str], path: Path, *, reason: str, dry_run: bool, wait: bool, force: bool, timeout: float | None
) -> int:
    """New replicas in the place of the old, one after another, and one role after another."""
    record = live_record(path, "for a role of it to be restarted")
    fields = {"reason": reason, "dry_run": dry_run, "force": force}
    code = 0
    for role in roles:
        waits = (wait or role != roles[-1]) and not dry_run
        code = code or _asked(record, role, "restart", fields, timeout, wait=waits)
    return code


def _asked(
    record: SupervisorRecord, role: str, action: str, fields: dict[str, Any], timeout: float | None, *, wait: bool
) -> int:
    body = fields | ({} if timeout is None else {"timeout_secs": timeout})
    found = ask(record, f"/{role}/{action}", body)
    if found["status"] in ("REJECTED", "CONFLICT"):
        raise ConfigError(f"{role} must be one that can be changed so now, got {found['status']}: {found['message']}")
    print(_line(found), flush=True)
    told = found["status"]
    while wait and told not in (*_WELL, "PARTIAL", "FAILED", "CANCELLED"):
        time.sleep(_LOOK_S)
        found = ask(record, f"/{role}/scale/{found['request_id']}")
        if found["status"] != told:
            told = found["status"]
            print(_line(found), flush=True)
    return 0 if not wait or told in _WELL else 1


def _line(found: dict[str, Any]) -> str:
    """`scale_out rollout 3 PENDING  1 replicas become 3  rollout-1, rollout-2`."""
    words = [f"{found['action']} {found['role']} {found['num_replicas']} {found['status']}", found["message"]]
    words.append(", ".join(found["selected_engines"]))
    words.append(found["error_message"])
    words += [f"{name}: {why}" for name, why in found["failed_engines"].items()]
    return "  ".join(word for word in words if word)
