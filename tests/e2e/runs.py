"""Real runs of the `rondo` command on the quick start, made small; and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson
import psutil

from rondo.launch.metrics.descriptions import describe, numbers
from rondo.launch.report.records import read_records

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"
PATIENCE_S = 60.0
PATIENT = ("supervision.silence_s=120", "supervision.grace_s=120", "reward.deadline_s=120")
"""On a busy machine nobody counts as dead, is killed while it leaves, or has no reward because it had to wait for the cores."""
SMALL = (
    *PATIENT,
    "num_steps=12",
    "sft.steps=8",
    "sft.warmup_steps=2",
    "rollout.prompts_per_step=8",
    "rollout.num_slots=64",
    "data.held_out=16",
    "evaluation.num_prompts=16",
)
TINY = ("model.build_args={'hidden_size': 32, 'num_layers': 1}", "sft.batch_size=16")
"""For runs that need not learn, and go on until something has happened to them."""


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


def command(folder: Path, *arguments: str, sets: tuple[str, ...] = (), config: Path = QUICKSTART) -> list[str]:
    """`python -m rondo.launch.cli train QUICKSTART`, small, in `folder`."""
    chosen = [part for text in (*SMALL, f"run_dir={folder}", *sets) for part in ("--set", text)]
    return [sys.executable, "-m", "rondo.launch.cli", "train", str(config), *chosen, *arguments]


class Running(subprocess.Popen[str]):
    """A command in a session of its own, whose output is read all the while: nothing that it prints can hold it up. It is over
    when its test is, whatever became of that (`over_behind_it`)."""

    started: ClassVar[set[Running]] = set()

    def __init__(self, line: list[str], folder: Path) -> None:
        super().__init__(
            line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.started.add(self)

    def end(self) -> None:
        """SIGKILL for it and for all that it has started, where it is still there, but for the janitor, which tidies up then."""
        self.started.discard(self)
        if self.poll() is None:
            tree = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "rondo.runtime.processes.janitor" not in process.cmdline():
                        process.kill()
            self.wait(PATIENCE_S)
            _, left = psutil.wait_procs(tree[1:], PATIENCE_S)
            assert left == []

    def _read(self) -> None:
        assert self.stdout is not None
        with self.stdout:
            for line in self.stdout:
                self.lines.put(line)
        self.lines.put(None)


@contextmanager
def over_behind_it() -> Iterator[None]:
    """Every command that begins inside is over behind it, also where an assertion failed while a run of 100,000 steps went on."""
    before = set(Running.started)
    try:
        yield
    finally:
        for process in Running.started - before:
            process.end()


def start(line: list[str], folder: Path) -> Running:
    return Running(line, folder)


def finish(process: Running, run_dir: Path, limit_s: float = 560.0) -> Ended:
    """Its end, with the output that nobody has read."""
    process.wait(limit_s)
    described(run_dir)
    return Ended(process.returncode, "".join(iter(process.lines.get, None)), run_dir)


def described(run_dir: Path) -> None:
    """Every metric that a run wrote is described, but a test's own."""
    told = {path for record in read_records(run_dir / "metrics.jsonl") for path, _ in numbers(record)}
    unknown = [path for path in told if describe(path) is None and not path.startswith("own_")]
    assert not unknown, unknown


def read_until(process: Running, text: str) -> str:
    """The line of the output that holds `text`."""
    for line in iter(process.lines.get, None):
        if text in line:
            return line
    process.lines.put(None)
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
