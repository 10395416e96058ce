"""Real runs of the `rondo` command on the quick start, made small; and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"
SMALL = (
    "num_steps=12",
    "sft.steps=8",
    "sft.warmup_steps=2",
    "rollout.prompts_per_step=8",
    "rollout.num_slots=64",
    "data.held_out=16",
    "evaluation.num_prompts=16",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over."""

    code: int
    output: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads((self.run_dir / "summary.json").read_bytes())
        return found


def command(folder: Path, *arguments: str, sets: tuple[str, ...] = ()) -> list[str]:
    """`python -m rondo.launch.cli train QUICKSTART`, small, in `folder`."""
    chosen = [part for text in (*SMALL, f"run_dir={folder}", *sets) for part in ("--set", text)]
    return [sys.executable, "-m", "rondo.launch.cli", "train", str(QUICKSTART), *chosen, *arguments]


def start(line: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command in a session of its own, its output in a pipe."""
    return subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], run_dir: Path, limit_s: float = 560.0) -> Ended:
    output, _ = process.communicate(timeout=limit_s)
    return Ended(process.returncode, output, run_dir)


def train(folder: Path, *arguments: str, sets: tuple[str, ...] = ()) -> Ended:
    return finish(start(command(folder, *arguments, sets=sets), folder), folder / "quickstart")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The line of the output that holds `text`."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the run ended before it printed {text!r}")


def left_behind(folder: Path) -> list[str]:
    """Processes that were started for a run in `folder` and are still there."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if environment.get("RONDO_RUN_DIR", "").startswith(str(folder)) and process.pid != os.getpid():
            found.append(f"{process.pid} {process.info['cmdline']}")
    return found
