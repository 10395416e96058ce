"""Run directories: what lies where, and who owns it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.launch.rundir import RunDir, existing_run, owner, supervisor_record
from rondo.runtime.errors import ConfigError

OWN_AND_WAIT = """
import sys
from pathlib import Path
from rondo.launch.rundir import RunDir
with RunDir.create(Path(sys.argv[1]), "demo", {}):
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWN_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_a_new_run_has_its_files_and_is_the_latest(tmp_path: Path) -> None:
    config_file = tmp_path / "my.py"
    config_file.write_text("config = 1\n")
    with RunDir.create(tmp_path / "runs", "demo", {"name": "demo"}, config_file) as run:
        names = {path.name for path in run.path.iterdir()}
        expected = {
            "config.py",
            "config.resolved.json",
            "environment.json",
            "logs",
            "journal",
            "samples",
            "checkpoints",
        }
        assert expected <= names
        assert json.loads(run.config_json.read_text()) == {"name": "demo"}
        assert json.loads((run.path / "environment.json").read_text())["packages"]["pydantic"]
        assert (tmp_path / "runs" / "latest").resolve() == run.path.resolve()


def test_a_directory_of_a_live_run_is_refused_with_its_pid(tmp_path: Path, other_owner: subprocess.Popen[str]) -> None:
    assert owner(tmp_path / "demo") == other_owner.pid
    for claim in (lambda: RunDir.create(tmp_path, "demo", {}), lambda: RunDir.claim(tmp_path / "demo")):
        with pytest.raises(ConfigError) as caught:
            claim()
        assert str(caught.value) == (
            f"the run directory {tmp_path / 'demo'} must have no other owner, got a live run with pid {other_owner.pid}. "
            f"Stop it with `rondo stop {tmp_path / 'demo'}`, or choose another name with --set name=..."
        )


def test_the_claim_of_a_killed_process_is_gone_with_it(tmp_path: Path, other_owner: subprocess.Popen[str]) -> None:
    other_owner.send_signal(signal.SIGKILL)
    other_owner.wait()
    assert owner(tmp_path / "demo") is None
    with RunDir.claim(tmp_path / "demo") as run:
        assert owner(run.path) == os.getpid()


def test_a_name_that_was_used_gets_the_next_number(tmp_path: Path) -> None:
    for expected in ("demo", "demo-2", "demo-3"):
        with RunDir.create(tmp_path, "demo", {}) as run:
            assert run.path.name == expected
        assert (tmp_path / "latest").resolve().name == expected


def test_attempts_are_counted_by_their_logs(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        assert run.next_attempt() == 0
        run.logs(run.next_attempt())
        run.logs(run.next_attempt())
        assert run.next_attempt() == 2


def test_how_to_reach_a_run_is_private_and_ends_with_it(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        run.write_supervisor(rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=80, token_path=tmp_path / "token")
        assert (run.path / "supervisor.json").stat().st_mode & 0o777 == 0o600
        record = supervisor_record(run.path)
        assert record is not None
        assert (record.pid, record.admin_port) == (os.getpid(), 80)
    assert supervisor_record(run.path) is None
    assert not (run.path / "supervisor.json").exists()


def test_a_record_left_by_a_killed_run_counts_for_nothing(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        run.write_supervisor(rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=80, token_path=tmp_path / "token")
        left = (run.path / "supervisor.json").read_bytes()
    (run.path / "supervisor.json").write_bytes(left)
    assert supervisor_record(run.path) is None


def test_a_folder_that_is_no_run_is_told_with_the_runs_there_are(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", {}).close()
    with pytest.raises(ConfigError) as caught:
        existing_run(tmp_path / "dmeo")
    assert str(caught.value) == (
        f"RUN must be a run directory, got {tmp_path / 'dmeo'}. Runs in {tmp_path}: demo, latest"
    )
