"""The job of `rondo slurm` on a real SLURM: told, queued again, ended; preempted; cancelled.

Only with SLURM_ROOT, a folder of Debian's packages munge, slurmctld, slurmd, slurm-client and what they need, unpacked:

    apt-get install --download-only -o Dir::Cache::archives=DEBS/ slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins
    for package in DEBS/*.deb; do dpkg -x $package SLURM_ROOT; done
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rondo.launch.config import load
from rondo.launch.slurm import SlurmOptions, script

ROOT = Path(os.environ.get("SLURM_ROOT", "/nowhere"))
QUICKSTART = Path("examples/quickstart.py")
PATIENCE_S = 240.0
"""What is queued again begins two minutes later."""
HOST = socket.gethostname().partition(".")[0]
LEADER = f"""#!{sys.executable} -S
import os, signal, sys
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(75))
print("up", os.environ.get("SLURM_RESTART_COUNT", 0), flush=True)
sys.exit(0) if os.path.exists("done") else [signal.pause() for _ in iter(int, 1)]
"""
SETTINGS = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={here}/munge.sock
PluginDir={lib}/slurm-wlm
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={here}
SlurmdSpoolDir={here}
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.log
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes={host} PriorityTier=9 PreemptMode=OFF
"""

pytestmark = pytest.mark.skipif(not (ROOT / "usr/sbin/slurmctld-wlm").exists(), reason="needs SLURM: SLURM_ROOT")


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


class Cluster:
    def __init__(self, here: Path) -> None:
        self.here, lib = here, ROOT / "usr/lib/x86_64-linux-gnu"
        ports, user = (free_port(), free_port()), os.environ.get("USER", "root")
        (here / "slurm.conf").write_text(SETTINGS.format(here=here, lib=lib, host=HOST, ports=ports, user=user))
        (here / "munge.key").write_bytes(os.urandom(128))
        (here / "munge.key").chmod(0o600)
        (here / "leader").write_text(LEADER)
        (here / "leader").chmod(0o755)
        libraries, path = f"{lib}:{lib}/slurm-wlm", f"{ROOT}/usr/bin:{os.environ['PATH']}"
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": libraries, "SLURM_CONF": str(here / "slurm.conf"), "PATH": path
        }  # fmt: skip
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        kinds = ("key", "sock", "pid", "log", "seed")
        munge = [f"--{name}={here}/munge.{kind}" for name, kind in zip(names, kinds, strict=True)]
        slurmd = ["slurmd-wlm", "-D", "-d", f"{ROOT}/usr/sbin/slurmstepd-wlm"]
        self.processes = []
        for command in (["munged", "-F", "--force", *munge], ["slurmctld-wlm", "-D"], slurmd):
            if command[0] != "munged":
                self.until(lambda: (here / "munge.sock").exists(), "munged listens")
            line = [f"{ROOT}/usr/sbin/{command[0]}", *command[1:]]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.processes.append(subprocess.Popen(line, env=self.environment, **quiet))  # type: ignore[call-overload]

    def until(self, so: Callable[[], object], what: str) -> None:
        """Daemons that are not ours tell nobody: they are asked again and again."""
        end = time.monotonic() + PATIENCE_S
        while not so():
            assert time.monotonic() < end, what
            time.sleep(0.1)

    def ask(self, *command: str, text: str | None = None) -> str:
        done = subprocess.run(
            command, cwd=self.here, env=self.environment, input=text, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def submit(self) -> str:
        made = script(load(QUICKSTART), SlurmOptions(QUICKSTART, cpus=1), "100M")
        made = re.sub(r"\S+ train examples/quickstart.py --resume-or-start", "./leader", made)
        made = re.sub(r"--chdir=.*", f"--chdir={self.here}", made)
        self.until(lambda: "idle" in self.ask("sinfo"), "the node is up")
        job = self.ask("sbatch", text=made).split()[-1]
        self.until(lambda: "up 0" in self.log(job), "the run is up")
        return job

    def log(self, job: str) -> str:
        file = self.here / f"quickstart-{job}.log"
        return file.read_text() if file.exists() else ""

    def state(self, job: str) -> tuple[str, str]:
        """Its state, and how often it was queued again."""
        told = self.ask("scontrol", "show", "job", job)
        return tuple(re.findall(r"JobState=(\w+)|Restarts=(\d+)", told)[n][n] for n in range(2))  # type: ignore[return-value]

    def close(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_job_is_told_queued_again_and_ended_preempted_or_cancelled(cluster: Cluster) -> None:
    job = cluster.submit()
    cluster.ask("scancel", "--batch", "--signal=USR1", job)  # as before its limit
    cluster.until(lambda: cluster.state(job) == ("PENDING", "1"), "queued again")
    assert "rondo: the run has left, and queued again" in cluster.log(job)
    (cluster.here / "done").touch()
    cluster.until(lambda: cluster.state(job)[0] == "COMPLETED", "ended")
    assert "up 1" in cluster.log(job)  # in the same log
    (cluster.here / "done").unlink()

    job = cluster.submit()
    cluster.ask("scontrol", "requeue", job)
    cluster.until(lambda: cluster.state(job) == ("PENDING", "1"), "queued again by SLURM")
    cluster.ask("scancel", job)

    job = cluster.submit()
    cluster.ask("sbatch", "--partition=high", "--output=/dev/null", "--wrap=true")
    cluster.until(lambda: cluster.state(job) == ("PENDING", "1"), "preempted, and queued again once")
    cluster.ask("scancel", job)

    job = cluster.submit()
    cluster.ask("scancel", job)
    cluster.until(lambda: "by SLURM's own hand" in cluster.log(job), "it has left")
    cluster.until(lambda: cluster.state(job)[0] == "CANCELLED", "cancelled, and so it stays")
