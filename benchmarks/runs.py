"""Runs that benchmarks make as a user makes them, by the command, and what was found, kept so that one stopped early goes on.

found = Cells(Path("runs/bench_distill/cells.jsonl")).made({"name": "grpo", "seed": 0}, lambda: figures(run(config, folder, {})))
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rondo.launch.report.records import evaluation_records, step_records
from rondo.runtime.processes.guard import guarded

ROOT = Path(__file__).resolve().parent.parent
_RUN_LIMIT_S = 7200.0


def rondo(*words: str) -> None:
    # Guarded, so that a benchmark that is killed leaves no run behind.
    command = guarded([sys.executable, "-m", "rondo.launch.cli", *words])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} must end with exit code 0, got {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def settings(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def run(config: Path, folder: Path, values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
    """(records of the steps, rewards held out at the start and the end)."""
    rondo("train", str(config), *settings({"name": "measured", "run_dir": folder, **values}))
    metrics = folder / "measured" / "metrics.jsonl"
    return step_records(metrics), [float(each["reward"]) for each in evaluation_records(metrics)]


class Cells:
    """The figures of each cell by what it is of, a line of JSON each; a line that was cut by a kill is made again."""

    def __init__(self, path: Path) -> None:
        self._path, self._made = path, dict[str, Any]()
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        for line in lines:
            if line.endswith("\n"):
                cell = json.loads(line)
                self._made[json.dumps(cell["of"], sort_keys=True)] = cell["found"]
        if lines and not lines[-1].endswith("\n"):
            path.write_text("".join(lines[:-1]), encoding="utf-8")

    def made(self, of: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the file holds of `of`, else what `make` finds now."""
        key = json.dumps(dict(of), sort_keys=True)
        if key not in self._made:
            line = json.dumps({"of": dict(of), "found": make()})
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self._made[key] = json.loads(line)["found"]
            print(line, flush=True)
        found: dict[str, Any] = self._made[key]
        return found
