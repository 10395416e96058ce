"""`rondo slurm`: a run as one batch job of SLURM on one node, as a plain script to read, to keep and to submit.

Owns the script and what the job asks for. Does not own the run: the job is `rondo train CONFIG.py --resume-or-start`, the same
command however often it is queued, so there is one run directory, which the first time makes and every other time goes on with.

    $ rondo slurm CONFIG.py --time 24:00:00 --submit

    signal before the limit, at a preemption    the run saves and leaves with 75: the job is queued again
    killed (137, 139, ...), say out of memory   queued again, so many times in a row
    0, 1, 2                                     done, failed, wrong settings: the job ends so
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rondo.launch.check.check import node_bytes
from rondo.launch.config import RunConfig, load
from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.orders import EXIT_REQUEUE

_GRACE_S = 600
"""From SLURM's signal to its limit, where the settings do not say how long a notice leaves."""
_MARGIN_S = 30
"""From the end of a run that a notice ends to SLURM's limit."""
_SPARE = 1.25
"""Of an estimate of memory."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What the command line says. `gpus`, `cpus`, `mem`: in the place of what the settings need; `sbatch`: further options of
    sbatch; `before`: lines of shell before the run."""

    config: Path
    sets: Sequence[str] = ()
    submit: bool = False
    nodes: int = 1
    gpus: int | None = None
    cpus: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch: Sequence[str] = ()
    before: Sequence[str] = ()
    container_image: str | None = None
    container_mounts: str | None = None
    grace: int | None = None
    max_requeues: int = 100
    max_kills: int = 3


def main(options: SlurmOptions) -> int:
    """Prints the script, or submits it. ConfigError where the run could not start, or SLURM is not there."""
    config = load(options.config, options.sets)
    if options.nodes != 1:
        raise ConfigError(
            f"--nodes must be 1, since all groups of a run start on one machine, got {options.nodes}. Remove it"
        )
    text = script(config, options, options.mem or _memory(config))
    if not options.submit:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch must be on the PATH to submit, got none. Call it where SLURM is, or without --submit")
    return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode


def script(config: RunConfig, options: SlurmOptions, mem: str) -> str:
    """The whole text. mem: as sbatch takes it, such as "64G"."""
    gpus = sum(config.most_replicas(group) * group.processes * group.devices for group in config.role_groups)
    gpus = gpus if options.gpus is None else options.gpus
    asks = {
        "job-name": config.name,
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": num_cores(config) if options.cpus is None else options.cpus,
        "gres": f"gpu:{gpus}" if gpus else None,
        "mem": mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"B:USR1@{_grace_s(config, options)}",
        "open-mode": "append",
        "output": "%x-%j.log",
        "chdir": Path.cwd(),
    }
    asked = [f"--{name}={shlex.quote(str(value))}" for name, value in asks.items() if value is not None]
    lines = [f"#SBATCH {option}" for option in (*asked, "--requeue", *options.sbatch)]
    return _SCRIPT.format(
        name=config.name,
        asks="\n".join(lines),
        before="".join(f"{line}\n" for line in options.before),
        command=" \\\n    ".join(_command(options, nvidia=gpus > 0)),
        requeue=EXIT_REQUEUE,
        max_requeues=options.max_requeues,
        max_kills=options.max_kills,
    )


def num_cores(config: RunConfig) -> int:
    """One for each compute thread and each worker of rewards and media, and one for everything else: advantages take
    milliseconds a step."""
    media = 0 if config.media is None else config.media.num_workers
    computing = sum(
        config.most_replicas(group)
        * group.processes
        * (group.threads + ("rollout" in group.roles) * (config.reward.num_workers + media))
        for group in config.role_groups
        if group.roles != ("advantages",)
    )
    return computing + 1


def _grace_s(config: RunConfig, options: SlurmOptions) -> int:
    notice_s, grace = config.preemption.grace_s, options.grace
    if notice_s is not None and grace is not None and grace < notice_s:
        raise ConfigError(
            f"--grace must be at least preemption.grace_s, got {grace} and {notice_s:g}. Raise it, or leave it out"
        )
    given = _GRACE_S if notice_s is None else math.ceil(notice_s) + _MARGIN_S
    return given if grace is None else grace


def _memory(config: RunConfig) -> str:
    """What `rondo check` estimates for the whole node, and some more."""
    with tempfile.TemporaryDirectory(prefix="rondo-slurm-") as folder:
        return f"{int(_SPARE * node_bytes(config, Path(folder)) / _GIB) + 1}G"


def _command(options: SlurmOptions, *, nvidia: bool) -> list[str]:
    """The run as a step of the job, a part a line. A step does not take the job's cores unless it asks for them."""
    image, mounts = options.container_image, options.container_mounts
    step = ["srun", "--ntasks=1", '--cpus-per-task="$SLURM_CPUS_PER_TASK"']
    program = Path(sys.executable).with_name("rondo")
    rondo = "rondo" if image is not None or not program.exists() else str(program)
    lines = []
    if image is not None and image.endswith(".sif"):
        binds = f" --bind {shlex.quote(mounts)}" if mounts else ""
        lines = [f'apptainer exec{" --nv" * nvidia} --pwd "$PWD" --bind "$PWD"{binds} {shlex.quote(image)}']
    elif image is not None:
        mounted = '--container-mounts="$PWD:$PWD"' + (f",{shlex.quote(mounts)}" if mounts else "")
        step += [f"--container-image={shlex.quote(image)}", mounted, '--container-workdir="$PWD"']
    sets = [f"--set {shlex.quote(text)}" for text in options.sets]
    return [
        " ".join(step),
        *lines,
        f"{shlex.quote(rondo)} train {shlex.quote(str(options.config))} --resume-or-start",
        *sets,
    ]


_SCRIPT = """\
#!/bin/bash
# The run `{name}` as a job of SLURM, written by `rondo slurm`. However often it is queued, it is the same command:
# the run starts, or goes on from its newest checkpoint. To end it for good: scancel.
{asks}

# How often it is queued again: in all, and in a row after it was killed.
max_requeues={max_requeues}
max_kills={max_kills}
kills="$SLURM_JOB_NAME-$SLURM_JOB_ID.kills" # a line each

leader="" notices=0
notice() {{ # of the limit, or of a preemption: the run saves and leaves
    notices=$((notices + 1))
    [ -z "$leader" ] || kill -USR1 "$leader"
}}
trap notice USR1 TERM

again() {{ # why, how often so far, how often at most
    if ! scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
        echo "rondo: $1, and the job ends by SLURM's own hand" # cancelled, or preempted: then SLURM queues it again
    elif [ "$2" -ge "$3" ]; then
        echo "rondo: $1, and not queued again after $2 times"
    else
        echo "rondo: $1, and queued again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}}

{before}{command} &
leader=$!
[ "$notices" = 0 ] || kill -USR1 "$leader"
while
    heard=$notices # a signal ends `wait`, and not the run
    wait "$leader"
    code=$?
    [ "$heard" != "$notices" ]
do :; done

[ "$code" -gt 128 ] && [ "$notices" != 0 ] && code={requeue} # it was told before it could listen
if [ "$code" = 0 ] || [ "$code" = {requeue} ]; then rm -f "$kills"; fi
if [ "$code" = {requeue} ]; then
    again "the run has left" "${{SLURM_RESTART_COUNT:-0}}" "$max_requeues"
elif [ "$code" -gt 128 ]; then
    echo "$code" >> "$kills"
    again "the run was killed (exit code $code)" "$(($(wc -l < "$kills") - 1))" "$max_kills"
fi
exit "$code"
"""
