"""Command lines, environments and logs, without starting anything but a shell command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.logs import LOGS
from rondo.runtime.supervision import launcher
from rondo.runtime.supervision.launcher import Surroundings, used_incarnations
from rondo.runtime.supervision.spec import GroupSpec, SupervisorConfig


def test_torchrun_never_restarts_and_meets_in_the_runs_store_under_this_incarnation(tmp_path: Path) -> None:
    around = Surroundings(tmp_path / "run", tmp_path / "rt", ("127.0.0.1", 2900))
    spec = GroupSpec("actor-0", "actor", 2, ("m:A", "m:B"), 3)
    job = around.group_job(spec, 7, 1, SupervisionConfig(grace_s=2.5, load_s=90))
    options = dict(zip(job.arguments[1:-8:2], job.arguments[2:-8:2], strict=True))
    assert options == {
        "--nnodes": "1", "--nproc-per-node": "2", "--rdzv-backend": "c10d", "--rdzv-endpoint": "127.0.0.1:2900",
        "--rdzv-conf": "is_host=false", "--rdzv-id": "actor-0.7", "--local-addr": "127.0.0.1", "--max-restarts": "0",
        "--shutdown-timeout": "3", "--signals-to-handle": "SIGQUIT",
        "--log-dir": str(tmp_path / "rt" / "torchrun"),
    }  # fmt: skip
    path = str(tmp_path / "rt" / "actor-0.fork")
    assert job.arguments[0] == path
    command = (sys.executable, "-I", "-S", launcher.proxy.__file__, path, "m:A", "m:B")
    assert job.arguments[-8:] == ("--no-python", *command)
    assert job.call == "rondo.runtime.supervision.root:main" and job.fds == ()
    wanted = {
        "RONDO_RT_DIR": str(tmp_path / "rt"), "RONDO_RUN_DIR": str(tmp_path / "run"), "RONDO_GROUP": "actor-0",
        "RONDO_INCARNATION": "7", "RONDO_ATTEMPT": "1", "RONDO_STORE": "127.0.0.1:2900", "OMP_NUM_THREADS": "3",
        "RONDO_LOAD_S": "90.0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    assert {name: job.environment[name] for name in wanted} == wanted
    assert job.log == tmp_path / "run" / "logs" / "attempt_1" / "actor-0.7.log"


def test_a_started_command_is_guarded_leads_a_session_and_writes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    main = launcher.start(["/bin/sh", "-c", "echo $PPID $(ps -o sid= -p $$) $$ $RONDO_X; echo oops >&2"], {
        **os.environ, "RONDO_X": "x",
    }, log)  # fmt: skip
    assert main.wait(60) == 0
    parent, session, pid, given, oops = " ".join(LOGS.last_lines(log)).split()
    assert (parent, session, pid, given, oops) == (str(os.getpid()), str(main.pid), str(main.pid), "x", "oops")


def test_incarnations_that_were_used_are_read_from_the_logs(tmp_path: Path) -> None:
    around = Surroundings(tmp_path, tmp_path / "rt", ("127.0.0.1", 1))
    for name, number, attempt in (("actor-0", 1, 0), ("actor-0", 10, 1), ("actor-0", 9, 1), ("store", 2, 1)):
        path = around.log_path(name, number, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "logs" / "attempt_1" / "note.txt").touch()
    assert used_incarnations(tmp_path) == {"actor-0": 10, "store": 2}
    assert used_incarnations(tmp_path / "none") == {}


def test_logs_of_lives_that_are_long_over_are_removed_but_for_the_first(tmp_path: Path) -> None:
    around = Surroundings(tmp_path, tmp_path / "rt", ("127.0.0.1", 1))
    (tmp_path / "logs" / "attempt_0").mkdir(parents=True)
    for number in range(1, 41):
        around.log_path("rollout-1", number, 0).touch()
        around.log_path("rollout-10", number, 0).touch()
    around.log_path("rollout-1", 41, 0)
    left = sorted(int(path.name.split(".")[1]) for path in (tmp_path / "logs").glob("*/rollout-1.*.log"))
    assert left == [1, *range(9, 41)]


@pytest.mark.parametrize("name", ["store", "coordinator", "actor/0", "Actor-0", "rollout-0"])
def test_names_that_cannot_be_told_apart_are_refused(tmp_path: Path, name: str) -> None:
    groups = (GroupSpec("rollout-0", "rollout", 1, ("m:R",)), GroupSpec(name, "x", 1, ("m:R",)))
    with pytest.raises(ConfigError, match="names of role groups must differ and look like 'actor-0', got "):
        SupervisorConfig(tmp_path, groups, "rondo.comm.bus.serve", SupervisionConfig())


def test_a_run_needs_a_role_group(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one role group"):
        SupervisorConfig(tmp_path, (), "rondo.comm.bus.serve", SupervisionConfig())
