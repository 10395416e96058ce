"""Whole runs of `rondo train` with servers that rondo starts itself, and what they leave behind.

Where a server does not start, a run tries again for ever: `read_until` and `finish` fail at once then, and show how its log ends.
"""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil

from tests.e2e.runs import PATIENT, Ended, Running
from tests.sglang.servers import environment, python

CONFIG = Path(__file__).parent / "small.py"
_LIMIT_S = 500.0
_TAIL_BYTES = 4000
_UNSTARTED = re.compile("sglang_gone .*did not start|died .*cause='exit code")


def line(folder: Path, *sets: str, interpreter: str | None = None, config: Path = CONFIG) -> list[str]:
    """The command of a run in `folder`; behind it there is room for options."""
    chosen = (
        f"run_dir={folder}", f"rollout.sglang.python={interpreter or python()}",
        f"rollout.sglang.environment={orjson.dumps(environment()).decode()}", *PATIENT, *sets,
    )  # fmt: skip
    parts = [part for text in chosen for part in ("--set", text)]
    return [sys.executable, "-m", "rondo.launch.cli", "train", str(config), *parts]


def lines_of(running: Running, run_dir: Path) -> Iterator[str]:
    """Those that nobody has read, until its end. AssertionError where a server does not start, or there is no end in time."""
    until = time.monotonic() + _LIMIT_S
    while True:
        try:
            text = running.lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"a run must come further within {_LIMIT_S:g} s\n{logs_of(run_dir)}") from None
        if text is None:
            running.lines.put(None)
            return
        if _UNSTARTED.search(text):
            raise AssertionError(f"a server must start, got {text}{logs_of(run_dir)}")
        yield text


def logs_of(run_dir: Path) -> str:
    """How the logs of a run's rollouts and servers end."""
    found = sorted([*run_dir.glob("logs/*/rollout-*.log"), *run_dir.glob("logs/*/*.sglang-*.log")])
    return "\n".join(f"{path}:\n{path.read_bytes()[-_TAIL_BYTES:].decode(errors='replace')}" for path in found)


def read_until(running: Running, run_dir: Path, text: str) -> None:
    """Until a line of the output holds `text`."""
    if not any(text in each for each in lines_of(running, run_dir)):
        raise AssertionError(f"the run ended before it printed {text!r}\n{logs_of(run_dir)}")


def finish(running: Running, run_dir: Path) -> Ended:
    """Its end, with the output that nobody has read."""
    output = "".join(lines_of(running, run_dir))
    return Ended(running.wait(_LIMIT_S), output, run_dir)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    return [event for event in map(orjson.loads, lines) if event["kind"] == kind]


def launchers(folder: Path) -> list[psutil.Process]:
    """Of the servers of the run in `folder`, the oldest first."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if "sglang.launch_server" in text and "guard.py" not in text and str(folder) in _run_dir_of(process):
            found.append(process)
    return sorted((each for each in found if each.parent() not in found), key=lambda each: each.create_time())


def _run_dir_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RONDO_RUN_DIR", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
