"""Deterministic runs of `task.py`: started in some mode, killed, stopped and resumed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.launch.report.timeline import read_run
from tests.e2e.runs import ROOT, Ended, Running, finish, left_behind, read_until, start
from tests.e2e.shell import Rondo, to_the_end

RONDO = [sys.executable, "-m", "rondo.launch.cli"]
TASK = ROOT / "tests" / "parity" / "task.py"
NUM_STEPS = 17
"""Seven passes of ten rows are 17 steps of four and two rows more: passes end inside of steps, and the data end the run."""

GROUPS = {
    "colocate": "[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages', 'reference']}]",
    "hybrid": "[{'name': 'rollout', 'roles': ['rollout']}, {'name': 'actor', 'roles': ['actor', 'advantages', 'reference']}]",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run in a folder of its own."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "parity"

    def line(
        self, mode: str = "fully_async", *, task: Path = TASK, sets: Sequence[str] = (), kills: Sequence[str] = ()
    ) -> list[str]:
        self.folder.mkdir(parents=True)
        chosen = [f"run_dir={self.folder}", *([] if mode == "fully_async" else [f"role_groups={GROUPS[mode]}"]), *sets]
        line = [*RONDO, "train", str(task), "--plain"]
        line += [part for text in chosen for part in ("--set", text)]
        return [*line, *(part for kill in kills for part in ("--kill", kill))]

    def train(self, *arguments: Any, **options: Any) -> Running:
        return start(self.line(*arguments, **options), self.folder)

    def resume(self, *options: str) -> Running:
        return start([*RONDO, "resume", str(self.path), *options], self.folder)

    def whole(self, rondo: Rondo, *arguments: Any, **options: Any) -> Ended:
        """The run from its first step to its last."""
        return self.over(to_the_end(rondo, self.line(*arguments, **options), self.path))

    def resumed(self, rondo: Rondo, *options: str) -> Ended:
        """The run from where it goes on to its last step."""
        return self.over(to_the_end(rondo, [*RONDO, "resume", str(self.path), *options], self.path))

    def over(self, ended: Ended) -> Ended:
        """It has come to its end, with nothing left."""
        assert ended.code == 0, ended.output
        assert left_behind(self.folder) == []
        return ended

    def stop(self, process: Running, at_step: int) -> None:
        """Ask it to save and leave once `at_step` is told."""
        read_until(process, f"step={at_step}/")
        process.send_signal(signal.SIGTERM)
        stopped = finish(process, self.path)
        assert stopped.code == 75, stopped.output

    def kill(self, process: Running, at_step: int) -> None:
        """SIGKILL the supervisor, and with it everything it started, once `at_step` is told."""
        read_until(process, f"step={at_step}/")
        process.kill()
        process.wait(60)


def scored_in_waits(run: Path) -> int:
    """How many forward rounds of the trainer's process began while it waited for a round. No forward round begins while it
    trains one, and at most one lies between a round that came and its training."""
    spans = [span for span in read_run(run)[0] if span.process == "actor-0.0"]
    trained = [span for span in spans if span.lane == "actor" and span.name == "train"]
    waits = [span for span in spans if span.lane == "actor" and span.name == "wait for a round"]
    forwards = [span for span in spans if span.lane == "reference" and span.name == "forward"]
    for training in trained:
        inside = [each for each in forwards if training.start < each.end and each.start < training.end]
        assert len(inside) <= 1, (training, inside)
        assert all(each.start <= training.start for each in inside), (training, inside)
    return sum(any(wait.start <= each.start <= wait.end for wait in waits) for each in forwards)
