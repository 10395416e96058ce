"""The curves of a run as a picture, drawn in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def draw(*arguments: str, without_matplotlib: bool = False) -> subprocess.CompletedProcess[str]:
    if without_matplotlib:
        code = (
            "import sys; sys.modules['matplotlib'] = None; from rondo.launch.report.plot import main; "
            f"sys.exit(main({list(arguments)!r}))"
        )
        command = [sys.executable, "-c", code]
    else:
        command = [sys.executable, "-m", "rondo.launch.report.plot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [
        {"time": k, "source": "actor-0", "kind": "metrics", "step": k, "reward_mean": k / 10, "staleness_mean": 0.5}
        for k in range(5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_curves_are_a_png_in_the_run_directory(run: Path) -> None:
    done = draw(str(run))
    assert (done.returncode, done.stdout) == (0, f"{run / 'curves.png'}\n")
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_install_line_is_told(run: Path) -> None:
    done = draw(str(run), without_matplotlib=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("plots need matplotlib, got no such package. Install it: pip install 'rondo-rl[plot]'\n")


def test_a_run_without_a_step_is_told(tmp_path: Path) -> None:
    done = draw(str(tmp_path), without_matplotlib=True)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert done.stderr.startswith(f"RUN must have finished a step, got {tmp_path} without any")
