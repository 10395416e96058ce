"""Launcher: the command line, environment and log of everything that the supervisor starts.

Owns how processes are started: through the guard, in a session of their own (a Ctrl-C on the terminal reaches the
supervisor alone), their output in `logs/attempt_N/<group>.<incarnation>.log` (`logs.py`). Does not own when. What needs torch is
a `Job`, which the nursery forks.

torchrun starts the workers of a role group, through proxies, and never restarts them (`--max-restarts 0`): that is the
supervisor's business. It meets in the run's one store, under an id of this incarnation, and opens no listening socket of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rondo.runtime.processes.cgroup import Cgroup
from rondo.runtime.processes.guard import CGROUP, guarded, module_command
from rondo.runtime.records.logs import LOGS
from rondo.runtime.supervision import proxy
from rondo.runtime.supervision.spec import (
    ATTEMPT,
    GROUP,
    INCARNATION,
    LOAD_S,
    RT_DIR,
    RUN_DIR,
    STORE,
    GroupSpec,
)

if TYPE_CHECKING:
    from rondo.runtime.config import SupervisionConfig

TORCHRUN_MAIN = "torch.distributed.run:main"
ROOT_MAIN = "rondo.runtime.supervision.root:main"
STORE_MAIN = "rondo.runtime.supervision.store:main"
_LOG = re.compile(r"(.+)\.(\d+)\.log")
_KEPT_LOGS = 32
"""Of a role group or service: those of its first life and of so many newest ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program in a process of its own. `call` names its main function ("module:function"), which finds `arguments` in
    sys.argv, and after them the numbers of the descriptors that it keeps: `fds`, as this process has them."""

    call: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all processes of a run share. `store` is the host and port of its TCPStore."""

    run_dir: Path
    rt_dir: Path
    store: tuple[str, int]
    cgroup: Cgroup | None = None

    def environment(self, name: str, incarnation: int, attempt: int) -> dict[str, str]:
        """This process's environment and the run's own variables."""
        return {
            **os.environ,
            RT_DIR: str(self.rt_dir),
            RUN_DIR: str(self.run_dir),
            GROUP: name,
            INCARNATION: str(incarnation),
            ATTEMPT: str(attempt),
            STORE: "{}:{}".format(*self.store),
            **({} if self.cgroup is None else {CGROUP: str(self.cgroup.path)}),
            "PYTHONUNBUFFERED": "1",
        }

    def log_path(self, name: str, incarnation: int, attempt: int) -> Path:
        """Where that life's output goes. Logs of lives that are long over are removed."""
        logs = self.run_dir / "logs"
        with contextlib.suppress(OSError):  # the next life removes them
            lives = {
                int(found[2]): path for path in logs.glob(f"*/{name}.*.log") if (found := _LOG.fullmatch(path.name))
            }
            for _, path in sorted(lives.items())[1:-_KEPT_LOGS]:
                path.unlink(missing_ok=True)
        return logs / f"attempt_{attempt}" / f"{name}.{incarnation}.log"

    def place(self, name: str, attempt: int) -> Callable[[int], tuple[Path, dict[str, str]]]:
        """Log and environment of a process of that name, by its incarnation."""
        return lambda number: (self.log_path(name, number, attempt), self.environment(name, number, attempt))

    def group_job(self, spec: GroupSpec, incarnation: int, attempt: int, limits: SupervisionConfig) -> Job:
        """The root of a role group, and its torchrun."""
        host, port = self.store
        socket_path = str(self.rt_dir / f"{spec.name}.fork")
        arguments = (
            socket_path,
            "--nnodes", "1",
            "--nproc-per-node", str(spec.num_processes),
            "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{host}:{port}",
            "--rdzv-conf", "is_host=false",
            "--rdzv-id", f"{spec.name}.{incarnation}",
            "--local-addr", host,
            "--max-restarts", "0",
            "--shutdown-timeout", str(math.ceil(limits.grace_s)),
            "--signals-to-handle", "SIGQUIT",  # else it ends its workers at a signal that is meant for the supervisor
            "--log-dir", str(self.rt_dir / "torchrun"),
            "--no-python", sys.executable, "-I", "-S", proxy.__file__, socket_path, *spec.roles,
        )  # fmt: skip
        environment = {
            **self.environment(spec.name, incarnation, attempt),
            LOAD_S: str(limits.load_s),
            "OMP_NUM_THREADS": str(spec.threads),
            "MKL_NUM_THREADS": str(spec.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            # One of the user's own stays: a server on another node is sent weights from here.
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            # Else torchrun opens a store of its own, for everyone on the network.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        return Job(ROOT_MAIN, arguments, environment, self.log_path(spec.name, incarnation, attempt))

    def store_job(self, name: str, incarnation: int, attempt: int, fd: int) -> Job:
        """The run's store, on the socket that it listens on already."""
        environment = {**self.environment(name, incarnation, attempt), "OMP_NUM_THREADS": "1"}
        log = self.log_path(name, incarnation, attempt)
        return Job(STORE_MAIN, (), environment, log, (fd,))

    def start_service(self, name: str, module: str, incarnation: int, attempt: int) -> subprocess.Popen[bytes]:
        """Starts a plain Python process."""
        environment = {**self.environment(name, incarnation, attempt), "OMP_NUM_THREADS": "1"}
        return start(module_command(module), environment, self.log_path(name, incarnation, attempt))


def used_incarnations(run_dir: Path) -> dict[str, int]:
    """The highest incarnation of each role group and service that ever ran in this run directory, from its logs."""
    highest: dict[str, int] = {}
    for path in (run_dir / "logs").glob("attempt_*/*.log"):
        match = _LOG.fullmatch(path.name)
        if match is not None:
            highest[match[1]] = max(highest.get(match[1], 0), int(match[2]))
    return highest


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    pass_fds: Sequence[int] = (),
    *,
    deaf: bool = True,
) -> subprocess.Popen[bytes]:
    """Starts a command that dies with this process, and where it is `deaf` ignores signals that are meant for the supervisor
    (`guard.py`). To be called from the main thread only."""
    with LOGS.open(log) as output:
        return subprocess.Popen(
            guarded(command, deaf=deaf),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
