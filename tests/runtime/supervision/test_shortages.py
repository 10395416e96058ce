"""A supervisor that is short of inodes or descriptors, or whose run-time directory is removed: roles start again, and what was
missing is told by its name."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.records.ledger import Ledger
from rondo.runtime.supervision.spec import GroupSpec, SupervisorConfig
from rondo.runtime.supervision.supervisor import Supervisor
from tests.runtime.supervision.test_supervisor import Program, program

IDLE = [("beta-0", 1, ["Idle"])]


def restarted(run: Program, incarnation: int = 2) -> None:
    """After a death by SIGKILL."""
    os.kill(run.pid("beta-0", incarnation=incarnation - 1), signal.SIGKILL)
    run.ready("beta-0", incarnation=incarnation)


def stopped(run: Program) -> dict[str, object]:
    run.process.send_signal(signal.SIGTERM)
    return run.end()


def test_a_log_that_cannot_be_opened_decides_no_life(tmp_path: Path) -> None:
    with program(tmp_path, IDLE) as run:
        run.ready("store", "coordinator", "beta-0")
        (tmp_path / "logs" / "attempt_0").rename(tmp_path / "logs" / "away")
        (tmp_path / "logs" / "attempt_0").touch()  # no file can be made there
        restarted(run)
        assert stopped(run)["exit_code"] == 75 and run.of("not_told", what="logs")


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=48", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("no file system of few inodes can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_without_an_inode_a_role_starts_again(tmp_path: Path) -> None:
    with tiny_disk(tmp_path), program(tmp_path, IDLE) as run:
        run.ready("store", "coordinator", "beta-0")
        with contextlib.suppress(OSError):
            for number in range(100):
                (tmp_path / f"fill{number}").touch()
        restarted(run)
        (tmp_path / "fill0").unlink()
        restarted(run, 3)
        assert stopped(run)["exit_code"] == 75
        (died, _) = run.of("died")
        assert died["cause"] in ("killed by SIGKILL", "ended without a word")
        assert "No space left on device" in run.of("not_told", what="logs")[0]["why"]


def test_without_a_descriptor_a_role_starts_again_with_those_that_were_held_back(tmp_path: Path) -> None:
    with program(tmp_path, IDLE) as run:
        run.ready("store", "coordinator", "beta-0")
        pid = run.process.pid
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH208
        first_free = next(number for number in range(1 << 16) if number not in used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, first_free))
        restarted(run)
        assert stopped(run)["exit_code"] == 75
        (short,) = run.of("short")
    assert "Too many open files" in short["why"] and "raise `ulimit -n`" in short["why"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_role_starts_again_when_a_cleaner_has_removed_the_run_time_directory(tmp_path: Path, *, whole: bool) -> None:
    with program(tmp_path, IDLE) as run:
        run.ready("store", "coordinator", "beta-0")
        if whole:
            shutil.rmtree(run.rt_dir)
        else:  # what is old, as sockets of services are
            for path in [each for each in run.rt_dir.iterdir() if not each.name.startswith("beta-0")]:
                path.unlink() if not path.is_dir() else shutil.rmtree(path)
        os.kill(run.pid("coordinator"), signal.SIGKILL)
        run.ready("coordinator", incarnation=2)
        restarted(run)
        assert stopped(run)["exit_code"] == 75
    assert not run.rt_dir.exists() and [each["group"] for each in run.of("died")] == ["coordinator", "beta-0"]


def test_a_run_that_can_open_nothing_ends_with_that_as_its_cause(tmp_path: Path) -> None:
    run = Program(tmp_path, IDLE, num_files=44, max_restarts=1)
    try:
        outcome = run.end()
    finally:
        run.close()
    assert outcome["exit_code"] == 1
    assert "not started: " in str(outcome["first_cause"]) and "Too many open files" in str(outcome["first_cause"])


@pytest.mark.parametrize("finds_state", [True, False])
async def test_a_run_whose_starts_all_fail_at_once_ends_with_every_life_gone(
    tmp_path: Path, *, finds_state: bool
) -> None:
    """A start that fails ends the run before the starts that were decided with it are done."""

    def short() -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    config = SupervisorConfig(
        tmp_path, (GroupSpec("beta-0", "beta", 1, ("Idle",)),), "coordinator", SupervisionConfig(max_restarts=0),
        can_restart_globally=lambda: finds_state, find_state=short, finds_state=finds_state,
    )  # fmt: skip
    supervisor = Supervisor(config)
    surroundings = SimpleNamespace(log_path=lambda name, *_: tmp_path / name)
    supervisor._estate = SimpleNamespace(  # type: ignore[assignment]
        keep=short, surroundings=surroundings, strays=lambda own: [], segments=SimpleNamespace(drop=lambda name: None)
    )
    supervisor._spare, supervisor._announcers = contextlib.ExitStack(), {}
    with Ledger(tmp_path, lambda record: None) as supervisor._ledger:
        async with asyncio.timeout(60), asyncio.TaskGroup() as supervisor._tasks:
            supervisor._do(supervisor._machine.begin(0.0))
            await supervisor._finished.wait()
    assert supervisor._outcome is not None and "not started: " in str(supervisor._outcome.first_cause)
