"""The estate: there while it is held, gone without a trace afterwards."""

from __future__ import annotations

import os
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
