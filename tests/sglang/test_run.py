"""Whole runs of `rondo train` that generate with servers which rondo starts itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from tests.e2e.runs import command, finish, left_behind, read_until, start
from tests.sglang.servers import environment, python

SETS = ("num_steps=8", "evaluation.at_start=False", "evaluation.at_end=True")


def line(folder: Path, *arguments: str) -> list[str]:
    settings = orjson.dumps(environment()).decode()
    sets = (*SETS, f"rollout.sglang.python={python()}", f"rollout.sglang.environment={settings}")
    return command(folder, *arguments, sets=sets)


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """A server leaves files of its own in shared memory when it is killed; those that were there are others'."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sgl")} == set()


def servers(folder: Path) -> list[psutil.Process]:
    """The launchers of this run's servers."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if "sglang.launch_server" not in text or "guard.py" in text:
            continue
        try:
            if process.environ().get("RONDO_RUN_DIR", "").startswith(str(folder)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    return [event for event in map(orjson.loads, lines) if event["kind"] == kind]


def test_a_server_killed_in_mid_generation_is_started_again_and_nothing_is_lost(
    tmp_path: Path, shared_memory: None
) -> None:
    running = start(line(tmp_path), tmp_path)
    read_until(running, "step=2/8")
    [server] = servers(tmp_path)
    family = [server, *server.children(recursive=True)]
    server.send_signal(signal.SIGKILL)
    read_until(running, "step=4/8")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    ended = finish(running, tmp_path / "quickstart")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == summary["samples_admitted"] == 8 * 8 * 8
    assert summary["restarts"] == {} and summary["steps"] == 8
    gap = summary["log_prob_gap"]
    print(f"log-prob difference of SGLang to the trainer, dense, float32, mean of a run: {gap}")
    assert gap["all"] < 1e-5
    [gone], [back] = events(ended.run_dir, "sglang_gone"), events(ended.run_dir, "sglang_back")
    assert gone["why"] == "killed by SIGKILL"
    print(f"a killed server serves again, with proved weights, after {back['after_s']:.1f} s")
    assert [event["version"] for event in events(ended.run_dir, "sglang")] == ["0.5.23"] * 2
    assert left_behind(tmp_path) == []


def test_a_killed_rollout_leaves_no_server_behind_and_comes_back_with_a_new_one(tmp_path: Path) -> None:
    running = start(line(tmp_path, "--kill", "rollout@2"), tmp_path)
    read_until(running, "step=1/8")
    [first] = servers(tmp_path)
    family = [first, *first.children(recursive=True)]
    assert len(family) >= 3
    read_until(running, "step=4/8")  # the second one generates by now
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    ended = finish(running, tmp_path / "quickstart")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert summary["restarts"] == {"rollout": 1}
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert left_behind(tmp_path) == []


def test_a_run_without_sglang_in_its_interpreter_says_how_to_get_it(tmp_path: Path) -> None:
    told = subprocess.run(
        command(tmp_path, sets=(f"rollout.sglang.python={sys.executable}",)),
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert told.returncode == 2
    assert f"must be an interpreter that has SGLang, got {sys.executable}" in told.stderr
    assert "rondo sglang install" in told.stderr
