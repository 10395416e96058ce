"""Two runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rondo.launch import cli
from rondo.launch.report.compare import compare
from rondo.launch.report.summary import Summary, write
from rondo.roles.training.parity import ParityLog
from rondo.runtime.errors import ConfigError
from tests.launch.dashboard.runs import SETTINGS, lines, of_step


def made(path: Path, *, loss: float = -2.0, seed: int = 0, torch: str = "2.9", rows: int = 6, **more: Any) -> Path:
    """A run of three steps, whose last one has that loss."""
    path.mkdir(parents=True)
    files = {
        "config.resolved.json": SETTINGS | {"seed": seed, "name": path.name},
        "data.json": {"data": {"num_rows": rows, "digest": "5d1c"}},
        "environment.json": {
            "time": 1.0, "command": [], "cwd": "/", "python": "3.11", "platform": "Linux", "num_cores": 2, "git": None,
            "packages": {"torch": torch}, "machine": {"host": "a"}, **more,
        },
    }  # fmt: skip
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    lines(path / "metrics.jsonl", [of_step(0), of_step(1, step_s=0.5 * rows), of_step(2, loss=loss, time=float(rows))])
    write(path, Summary(name=path.name, exit_code=0, attempt=0, steps=3, wall_s=1.5 * rows, restarts={"actor": 1}))
    return path


def test_runs_that_trained_the_same_are_equal_whatever_time_they_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    (b / "metrics.jsonl").write_text((b / "metrics.jsonl").read_text().replace('"step_s": 3.0', '"step_s": 9.0'))
    assert cli.main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "settings: equal\n" in out
    assert "metrics: equal in all 3 steps that both have\n" in out


def test_two_runs_are_compared_by_what_they_were_made_of_where_they_part_and_how_they_ended(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b", loss=-2.5, seed=1, torch="2.8", rows=7, num_cores=64)
    assert cli.main(["compare", str(a), str(b)]) == 1
    out = capsysbinary.readouterr().out.decode()
    for line in (
        "settings: 1 differ\n  seed: 0 | 1\n", "code: equal\n", "packages: 1 differ\n  torch: 2.9 | 2.8\n",
        "data: 1 differ\n  data.num_rows: 6 | 7\n", "machine: 1 differ\n  num_cores: 2 | 64\n",
        "metrics: part in step 2, in 1 of them\n  loss: -2 | -2.5\n",
    ):  # fmt: skip
        assert line in out
    assert [line.split() for line in out.splitlines() if line.startswith(("wall_s", "restarts"))] == [
        ["wall_s", "9", "10.5"],
        ["restarts", "1", "1"],
    ]
    assert cli.main(["compare", str(a), str(b), "--json"]) == 1
    told = json.loads(capsysbinary.readouterr().out)
    assert told["metrics"] == {"num_steps": 3, "step": 2, "metrics": {"loss": [-2.0, -2.5]}}
    assert told["bits"] is None


def test_settings_that_a_resume_changed_are_a_difference_with_the_step_from_which_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [{"time": 1.0, "version": 2, "settings": {"train.lr": [0.1, 0.2]}}]
    a, b = made(tmp_path / "a"), made(tmp_path / "b", changes=changes)
    assert cli.main(["compare", str(a), str(b)]) == 0
    assert "settings: 1 differ\n  changed train.lr (step 2): - | 0.1 -> 0.2\n" in capsys.readouterr().out


def test_of_deterministic_runs_the_bits_decide(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    for run, checksum in ((a, 11), (b, 12)):
        ParityLog(run, 0).write(1, checksum, [])
    found = compare(a, b)
    assert found.metrics.step is None and found.parts
    assert found.bits is not None and found.bits.startswith("step 0, all rounds equal, rank 0: the weights differ")


def test_a_run_that_is_none_and_ids_without_determinism_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = made(tmp_path / "a")
    assert cli.main(["compare", str(a), str(tmp_path / "none")]) == 2
    assert cli.main(["compare", str(a), str(a), "--ids"]) == 2
    assert "RUN must be the directory of a run with deterministic=True" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must be whole JSON"):
        compare(a, tmp_path)
