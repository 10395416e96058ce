"""Run directories: what lies where, and who owns it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.launch.rundir import RunDir, existing_run, newest_run, owner, read_json, supervisor_record, write_json
from rondo.runtime import formats
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import TAKEN

OWN_AND_WAIT = """
import sys
from pathlib import Path
from rondo.launch.rundir import RunDir
with RunDir.create(Path(sys.argv[1]), "demo", {}):
    print("owned", flush=True)
    sys.stdin.read()
"""

ASK = """
import sys
from pathlib import Path
from rondo.launch.rundir import owner
print("asking", flush=True)
while True:
    owner(Path(sys.argv[1]))
"""


@pytest.fixture
def other_owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWN_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_a_new_run_has_its_files_and_is_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # outside of a repository
    code = tmp_path / "code"
    code.mkdir()
    (code / "my.py").write_text("config = 1\n")
    (code / TAKEN).write_text('{"config": "my.py", "imports": []}')
    with RunDir.create(tmp_path / "runs", "demo", {"name": "demo"}, code) as run:
        assert (run.path / "config.py").read_text() == "config = 1\n" and not code.exists()
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


def test_a_claim_never_fails_beside_those_who_ask_who_owns_the_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", {}).close()
    readers = [
        subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path / "demo")], stdout=subprocess.PIPE) for _ in "ab"
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"asking\n"
        for _ in range(2000):
            RunDir.claim(tmp_path / "demo").close()
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()


def test_whoever_may_read_a_run_directory_may_ask_who_owns_it(
    tmp_path: Path, other_owner: subprocess.Popen[str]
) -> None:
    (tmp_path / "demo" / ".owner").chmod(0o444)
    assert owner(tmp_path / "demo") == other_owner.pid


def test_settings_and_command_lines_are_for_their_owner_alone(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        run.write_settings({"sglang": {"environment": {"TOKEN": "secret"}}})
        for name in ("config.resolved.json", "environment.json"):
            assert (run.path / name).stat().st_mode & 0o777 == 0o600


def test_a_run_directory_of_a_newer_release_is_refused_and_one_without_a_number_is_read(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        assert existing_run(run.path) == run.path
        (run.path / "format.json").write_text('{"format": 99, "release": "9.9.9"}')
        with pytest.raises(ConfigError) as caught:
            existing_run(run.path)
        (run.path / "format.json").unlink()
        assert existing_run(run.path) == run.path
    assert str(caught.value) == (
        f"{tmp_path / 'demo'} must be of format {formats.RUN} or older, got 99, which rondo 9.9.9 wrote. "
        f"This is rondo {formats.release()}: go on with that release or a newer one."
    )


@pytest.mark.parametrize("file", ["runs", "runs/demo"])
def test_a_file_where_a_folder_should_be_is_told(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(
        ConfigError, match=rf"^run_dir must be a folder to write to, got {tmp_path}/{file}: .*\. Choose"
    ):
        RunDir.create(tmp_path / "runs", "demo", {})


def test_a_full_disk_leaves_no_half_of_a_json_file(tmp_path: Path) -> None:
    limits, path = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, {"steps": 2, "name": "demo"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (read_json(path), list(tmp_path.iterdir())) == ({"steps": 1}, [path])


def test_a_torn_record_of_how_to_reach_a_run_counts_for_nothing(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        for text in ("", '{"pid": 1', "[]", '{"pid": 1}'):
            (run.path / "supervisor.json").write_text(text)
            assert supervisor_record(run.path) is None


def test_a_name_that_was_used_gets_the_next_number(tmp_path: Path) -> None:
    for expected in ("demo", "demo-2", "demo-3"):
        with RunDir.create(tmp_path, "demo", {}) as run:
            assert run.path.name == expected
        assert (tmp_path / "latest").resolve().name == expected


def test_attempts_are_counted_by_their_logs(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        assert run.next_attempt() == 0
        for attempt in range(2):
            (run.path / "logs" / f"attempt_{attempt}").mkdir()
        assert run.next_attempt() == 2


def test_how_to_reach_a_run_is_private_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    with RunDir.create(tmp_path, "demo", {}) as run:
        run.write_supervisor(rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=80, token_path=tmp_path / "token")
        assert (run.path / "supervisor.json").stat().st_mode & 0o777 == 0o600
        record = supervisor_record(run.path)
        assert record is not None
        assert (record.pid, record.admin_port) == (os.getpid(), 80)
        (tmp_path / "token").unlink()  # with its roles
        assert supervisor_record(run.path) is None
    assert supervisor_record(run.path) is None
    assert not (run.path / "supervisor.json").exists()


def test_a_record_left_by_a_killed_run_counts_for_nothing(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        run.write_supervisor(rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=80, token_path=tmp_path / "token")
        left = (run.path / "supervisor.json").read_bytes()
    (run.path / "supervisor.json").write_bytes(left)
    assert supervisor_record(run.path) is None


def test_a_run_is_found_by_the_name_that_it_recorded_and_of_several_starts_the_last_is_it(tmp_path: Path) -> None:
    def begun(folder: str, name: str, at: float) -> None:
        (tmp_path / folder).mkdir()
        write_json(tmp_path / folder / "config.resolved.json", {"name": name})
        write_json(tmp_path / folder / "environment.json", {"time": at})

    begun("exp-2", "exp-2", 9.0)  # a run of that name, and no second start of exp
    assert newest_run(tmp_path, "exp") is None
    for folder, name, at in (
        ("exp", "exp", 1.0), ("exp-3", "exp", 4.0), ("exp-4", "exp", 3.0), ("exp-large", "exp-large", 9.0),
        ("exp-eval", "exp", 9.0), ("exp-05", "exp", 9.0), ("old-exp", "exp", 9.0), ("exp-2-2", "exp-2", 10.0),
    ):  # fmt: skip
        begun(folder, name, at)
    (tmp_path / "exp-6").symlink_to("exp-2")
    assert newest_run(tmp_path, "exp") == tmp_path / "exp-3"  # exp-4 was there before exp was removed and started again
    assert newest_run(tmp_path, "exp-2") == tmp_path / "exp-2-2"
    assert newest_run(tmp_path, "ex") is newest_run(tmp_path / "nowhere", "exp") is None


def test_a_folder_that_is_no_run_is_told_with_the_runs_there_are(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", {}).close()
    with pytest.raises(ConfigError) as caught:
        existing_run(tmp_path / "dmeo")
    assert str(caught.value) == (
        f"RUN must be a run directory, got {tmp_path / 'dmeo'}. Runs in {tmp_path}: demo, latest"
    )
