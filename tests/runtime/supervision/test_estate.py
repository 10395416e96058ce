"""The estate: there while it is held, gone without a trace afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.runtime.errors import ConfigError
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes import process
from rondo.runtime.supervision.estate import Estate


def test_an_estate_is_private_while_it_lasts_and_leaves_nothing(tmp_path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with Estate(tmp_path / "run", "actor-0.0", lambda registration: None) as estate:
        assert estate.rt_dir.stat().st_mode & 0o777 == 0o700
        assert (estate.rt_dir / "token").stat().st_mode & 0o777 == 0o600
        assert (estate.rt_dir / "token").read_text() == estate.token and len(estate.token) == 64
        assert estate.store_socket.getsockname() == estate.surroundings.store
        with SegmentClient(estate.rt_dir / "handover.sock", estate.token) as client:
            client.segment("ring", 4096).close()
        environment = estate.surroundings.environment("actor-0", 1, 0)
        command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(command, env={}, start_new_session=True)
        assert environment["RONDO_GROUP"] == "actor-0"
        assert [stray.pid for stray in estate.strays(frozenset())] == [child.pid]
    assert child.wait(0) == -9  # ended before the estate was
    assert not estate.rt_dir.exists() and process.stat(estate.janitor.pid) is None
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors  # garbage of other tests may go meanwhile
    estate.close()


def test_what_a_cleaner_removes_is_made_anew_and_what_is_somebody_elses_is_not_taken(tmp_path: Path) -> None:
    with Estate(tmp_path / "run", "actor-0.0", lambda registration: None) as estate:
        before = SegmentClient(estate.rt_dir / "handover.sock", estate.token)
        for removed in ("token", "handover.sock", ""):
            found = estate.rt_dir / removed
            shutil.rmtree(found) if found.is_dir() else found.unlink()
            estate.keep()
            assert estate.rt_dir.stat().st_mode & 0o777 == 0o700
            assert (estate.rt_dir / "token").read_text() == estate.token
            with SegmentClient(estate.rt_dir / "handover.sock", estate.token) as client:
                client.segment("ring", 4096).close()
            folder = os.open(estate.rt_dir, os.O_RDONLY)
            with pytest.raises(BlockingIOError):  # as systemd-tmpfiles finds it
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(folder)
        before.segment("ring", 0).close()
        before.close()
        os.utime(estate.rt_dir, (0, 0))
        estate._touched_at = -1e9
        estate.keep()
        assert estate.rt_dir.stat().st_mtime > 0
        shutil.rmtree(estate.rt_dir)
        estate.rt_dir.symlink_to(tmp_path)
        with pytest.raises(PermissionError, match="must be this run's own, got somebody else's"):
            estate.keep()
        estate.rt_dir.unlink()


def test_an_estate_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("rondo.runtime.supervision.estate.SegmentServer.start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Estate(tmp_path / "run", "actor-0.0", lambda registration: None)
    assert os.listdir(tmp_path) == ["run"]  # noqa: PTH208


def test_a_long_temporary_folder_is_passed_over_for_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    with Estate(tmp_path / "run", "actor-0.0", lambda registration: None) as estate:
        assert estate.rt_dir.parent == Path("/tmp")
    with pytest.raises(ConfigError, match="names of role groups must be shorter"):
        Estate(tmp_path / "run", "x" * 100, lambda registration: None)
