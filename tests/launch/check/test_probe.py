"""What `rondo check --probe` tries: real disks, memory, sockets and processes, which end by their deadlines and leave nothing."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.launch.check import jobs
from rondo.launch.check.findings import Facts
from rondo.launch.check.jobs import run_jobs
from rondo.launch.check.probe import _limits, _ports, probe
from rondo.launch.cli import main
from rondo.launch.config import load
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.processes import process
from rondo.runtime.supervision.launcher import Job
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.waits import waiting
from tests.launch import configs

FACTS = Facts(num_parameters=1_000_000, num_tensors=30, max_positions=512, num_devices=0, num_rows=32, num_held_out=8)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("nursery")
    process.set_child_subreaper()
    with Nursery() as made:
        made.belong(lambda _: (folder / "nursery.log", os.environ))
        run_jobs(made, [Job("os:getpid", (), dict(os.environ), folder / "log")], "load", 600.0)
        yield made
    ctypes.CDLL(None).prctl(
        process._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0
    )  # orphans of other tests are not to stay below us


def test_all_that_a_run_stands_on_is_tried_and_nothing_is_left(nursery: Nursery, tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), [f"run_dir={tmp_path}/runs"])
    (folder := tmp_path / "told").mkdir()
    before, there = set(tmp_path.iterdir()), below()
    found = list(probe(config, FACTS, folder, nursery))
    assert [each.text for each in found if each.level == "error"] == []
    for what in ("the disk of", "shared memory gives", "files may be open", "of admin listens", "gloo carries"):
        assert any(what in each.text for each in found), what
    assert set(tmp_path.iterdir()) == before
    assert below() <= there | {nursery.pids["nursery"]}


def test_what_does_not_end_by_its_deadline_is_ended(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Job("signal:pause", (), dict(os.environ), tmp_path / "log")
    there, begun, waits = below(), set[int](), list[waiting]()
    monkeypatch.setattr(jobs, "waiting", lambda *what, **how: waits.append(waiting(*what, **how)) or waits[-1])

    def time_is_over() -> None:
        begun.update(below())
        waits[-1]._expire()

    with pytest.raises(DeadlineExceeded, match="probe of patience"):
        run_jobs(nursery, [stuck, stuck], "probe of patience", 600.0, time_is_over)
    assert len(begun - there - {nursery.pids["nursery"]}) == 2
    assert nursery.pids["nursery"] in below() <= there | {nursery.pids["nursery"]}  # what others have may go meanwhile


def below() -> set[int]:
    """What this process has started, and what they have: a run of another test's among them."""
    return {each.pid for each in process.below(os.getpid())}


def test_a_way_that_cannot_be_gone_is_an_error_with_what_to_do(nursery: Nursery, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load(configs.write(tmp_path), [f"run_dir={tmp_path}/runs", f"admin.port={port}"])
        [wrong] = [each.text for each in _ports(config) if each.level == "error"]
    assert wrong.startswith(f"127.0.0.1:{port} of admin must be reached from here, got Address already in use")


def test_too_few_files_are_told(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), [f"run_dir={tmp_path}/runs"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = list(_limits(config, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert any(each.level == "note" and each.text.startswith("512 files may be open at once") for each in found)


def test_other_machines_cannot_be_tried_from_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(configs.write(tmp_path)), "--probe", "--devices", "0", "--memory-gib", "8"]) == 2
    assert (
        capsys.readouterr().err == "--probe must be of this machine, got options of other ones. Leave it out, or them\n"
    )


def test_a_swept_folder_is_gone_with_whoever_made_it_also_after_sigkill() -> None:
    code = (
        "import signal; from rondo.runtime.processes.janitor import swept_folder\n"
        "with swept_folder('rondo-test-') as folder: print(folder, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        folder = Path(maker.stdout.readline().strip())
        assert folder.is_dir()
        [janitor] = [each.pid for each in process.below(maker.pid)]
        ended = os.pidfd_open(janitor)
        maker.kill()
        assert select.select([ended], [], [], 120)[0]
        os.close(ended)
    assert not folder.exists()
