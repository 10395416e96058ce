"""The script of a batch job: its text, and what it does when the run ends in any way, told or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.launch import cli
from rondo.launch.check import check
from rondo.launch.check.estimate import PREFILL, Shape, Traced
from rondo.launch.check.findings import Facts, Finding, Report
from rondo.launch.config import load
from rondo.launch.slurm import SlurmOptions, main, num_cores, script
from rondo.runtime.errors import ConfigError

QUICKSTART = Path("examples/quickstart.py")
GOLDEN = Path(__file__).with_name("quickstart.sbatch")
SRUN = f"""#!{sys.executable} -S
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("up", *sys.argv[1:], flush=True)
code = os.environ["CODE"]
signal.pause() if code == "notice" else os.kill(os.getpid(), int(code[3:])) if code.startswith("sig") else sys.exit(int(code))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo "   JobState=$STATE Reason=None"; else echo "$@"; fi
"""


def text(*sets: str, **options: object) -> str:
    return script(load(QUICKSTART, sets), SlurmOptions(QUICKSTART, sets, **options), "4G")  # type: ignore[arg-type]


class Cluster:
    """`srun` and `scontrol` that do what CODE and STATE say, and the script of a job, run by bash as SLURM runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, body in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(body)
            (folder / name).chmod(0o755)
        (folder / "job").write_text(text())

    def start(self, code: str, *, restarts: int = 0, state: str = "RUNNING") -> subprocess.Popen[str]:
        told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "quickstart", "SLURM_RESTART_COUNT": str(restarts)}
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "6", "CODE": code, "STATE": state}
        return subprocess.Popen(
            ["bash", "job"], cwd=self.folder, env=os.environ | told | path, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, *, restarts: int = 0, state: str = "RUNNING") -> tuple[int, str]:
        """Exit code of the script, and what it said after the run had begun."""
        with self.start(code, restarts=restarts, state=state) as job:
            said = job.communicate(timeout=120)[0]
        return job.returncode, said.partition("\n")[2]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_whole_script_is_this() -> None:
    made = text(
        "train.save_every=50", time="24:00:00", partition="gpu", before=("module load cuda",), sbatch=("--qos=high",)
    )
    program = Path(sys.executable).with_name("rondo")
    assert made.replace(str(program), "rondo").replace(str(Path.cwd()), "FOLDER") == GOLDEN.read_text()
    subprocess.run(["bash", "-n", GOLDEN], check=True)


def test_a_job_asks_for_what_its_groups_need() -> None:
    rollout = {"name": "rollout", "roles": ["rollout"], "replicas": 2, "devices": 1}
    actor = {"name": "actor", "roles": ["actor", "advantages"], "processes": 4, "devices": 1}
    sets = [f"role_groups={[rollout, actor]}", "algorithm.kl_coef=0", "algorithm.old_log_probs=rollout"]
    config = load(QUICKSTART, [*sets, "reward.num_workers=3"])
    made = script(config, SlurmOptions(QUICKSTART), "9G")
    assert num_cores(config) == 2 * (1 + 3) + 4 + 1
    assert "#SBATCH --gres=gpu:6\n" in made and "#SBATCH --cpus-per-task=13\n" in made and "#SBATCH --mem=9G\n" in made
    grows = load(QUICKSTART, [*sets, "reward.num_workers=3", "autoscale={'max_replicas': 4}"])
    assert num_cores(grows) == 4 * (1 + 3) + 4 + 1 and "--gres=gpu:8\n" in script(grows, SlurmOptions(QUICKSTART), "9G")
    assert "--gres" not in text() and "#SBATCH --cpus-per-task=32\n" in text(cpus=32)


def test_the_signal_comes_before_the_limit_by_what_a_notice_leaves() -> None:
    lines = [text(), text(grace=900), text("preemption.grace_s=119.5"), text("preemption.grace_s=119.5", grace=120)]
    assert [line.partition("--signal=")[2].partition("\n")[0] for line in lines] == [
        f"B:USR1@{grace}" for grace in (600, 900, 150, 120)
    ]
    with pytest.raises(ConfigError, match=r"^--grace must be at least preemption.grace_s, got 100 and 119.5"):
        text("preemption.grace_s=119.5", grace=100)


def test_a_container_is_pyxis_or_a_file_of_apptainer() -> None:
    pyxis = text(container_image="nvcr.io#nvidia/pytorch", container_mounts="/data:/data")
    assert "--container-image='nvcr.io#nvidia/pytorch' --container-mounts=\"$PWD:$PWD\",/data:/data" in pyxis
    sif = text(container_image="rondo.sif", container_mounts="/data:/data", gpus=2)
    assert 'apptainer exec --nv --pwd "$PWD" --bind "$PWD" --bind /data:/data rondo.sif \\\n    rondo train' in sif


def test_a_run_that_leaves_after_a_notice_is_queued_again_and_only_while_the_job_is_its_own(cluster: Cluster) -> None:
    with cluster.start("notice") as job:
        assert job.stdout is not None
        begun = job.stdout.readline()
        job.send_signal(signal.SIGUSR1)
        said = job.communicate(timeout=120)[0]
    program = Path(sys.executable).with_name("rondo")
    assert begun == f"up --ntasks=1 --cpus-per-task=6 {program} train examples/quickstart.py --resume-or-start\n"
    assert (job.returncode, said) == (75, "rondo: the run has left, and queued again\nrequeue 7\n")
    assert cluster.run("75")[1].endswith("requeue 7\n")
    cancelled = (75, "rondo: the run has left, and the job ends by SLURM's own hand\n")
    assert cluster.run("75", state="COMPLETING") == cancelled
    assert cluster.run("75", restarts=99)[1].endswith("requeue 7\n")
    assert cluster.run("75", restarts=100)[1] == "rondo: the run has left, and not queued again after 100 times\n"


def test_a_run_that_is_killed_is_queued_again_a_few_times_in_a_row(cluster: Cluster) -> None:
    for number in range(3):
        code, said = cluster.run(("sig9", "sig11", "137")[number])
        assert code in (137, 139) and said.endswith("requeue 7\n")
    assert cluster.run("137") == (
        137,
        "rondo: the run was killed (exit code 137), and not queued again after 3 times\n",
    )
    cluster.run("75")  # it has come further
    assert cluster.run("137")[1].endswith("requeue 7\n")


@pytest.mark.parametrize("code", ["0", "1", "2"])
def test_a_run_that_is_done_or_has_failed_ends_its_job(cluster: Cluster, code: str) -> None:
    assert cluster.run(code) == (int(code), "")


def test_the_command_prints_the_script_or_hands_it_to_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["slurm", str(QUICKSTART), "--mem", "4G"]
    assert cli.main(command) == 0
    assert capfd.readouterr().out == text(mem="4G")
    (tmp_path / "sbatch").write_text('#!/bin/bash\nread -r first; echo "$first"; cat > /dev/null; exit 3\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main([*command, "--submit"]) == 3
    assert capfd.readouterr().out == "#!/bin/bash\n"
    (tmp_path / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^sbatch must be on the PATH to submit, got none"):
        main(SlurmOptions(QUICKSTART, submit=True, mem="4G"))
    with pytest.raises(ConfigError, match=r"^--nodes must be 1, since all groups of a run start on one machine, got 2"):
        main(SlurmOptions(QUICKSTART, nodes=2))


def test_the_memory_asked_for_is_what_a_check_estimates_with_the_most_replicas_and_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gib = 1 << 30
    shape = Shape(
        vocab_size=100, keys=4, num_caching=2, decoder_parameters=1400, encoder_parameters=0, trained_decoder=1400,
        trained_encoders=0, widths=500,
    )  # fmt: skip
    traced = {name: Traced("traced", {"parameters": gib}) for name in ("actor", "reference", "actor_fwd", PREFILL)}
    facts = Facts(num_parameters=1400, num_tensors=10, max_positions=4096, shape=shape, traced=traced)
    monkeypatch.setattr(check, "_look", lambda *_, **__: Report([], facts))
    sizes = []
    for sets in ([], ["--set", "autoscale={'max_replicas': 4}"]):
        assert cli.main(["slurm", str(QUICKSTART), *sets]) == 0
        sizes.append(int(capsys.readouterr().out.partition("--mem=")[2].partition("G\n")[0]))
    # A rollout more: its process and rewards' workers by estimate, what it computes with, and a ring; a quarter more of it.
    assert sizes[0] > 10 and sizes[1] - sizes[0] >= 3 * 1.25 * 3
    wrong = Report([Finding("error", "data.path must be there")], Facts())
    monkeypatch.setattr(check, "_look", lambda *_, **__: wrong)
    assert cli.main(["slurm", str(QUICKSTART)]) == 2
    assert capsys.readouterr() == ("", "data.path must be there\n")
