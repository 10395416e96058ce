"""`rondo check --probe`: what a run stands on, tried: disk, shared memory, limits, ports, devices, the way between processes.

Owns what is tried of these settings, for how long, and what is told of it, each with what to do. Does not own the trying, which
is done in processes of the nursery (`probing.py`) and ends with them. Invariant: every try has a deadline, and what does not end
by it is ended and told; nothing is written that has a name but in `folder`.

    findings = list(probe(config, facts, folder, nursery))
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.check.findings import Facts, Finding, error, note, ok
from rondo.launch.check.jobs import run_jobs
from rondo.launch.check.target import segment_bytes, version_bytes
from rondo.launch.config import RunConfig
from rondo.launch.dashboard.memory import ask_driver
from rondo.launch.machine import show_bytes
from rondo.launch.progress import at_work
from rondo.runtime.errors import DeadlineExceeded, WorkerDied
from rondo.runtime.memory.free import free_memory_bytes
from rondo.runtime.records.logs import LOGS
from rondo.runtime.supervision.launcher import Job
from rondo.runtime.supervision.nursery import Nursery

_DISK_S, _DEVICES_S, _BANDWIDTH_S = 30.0, 120.0, 150.0
_MEMORY_BYTES_S = 64 << 20
"""Slower than that, pages are not made but swapped in."""
_CHECKPOINT_S, _APPEND_S = 60.0, 1e-3
_FILES, _FILES_OF_EACH = 1024, 32
_THREADS, _THREADS_OF_EACH = 256, 64
_CONNECT_S = 2.0
_SHM_BYTES = 64 << 20
"""What NCCL may take of /dev/shm for each device."""
_HOT_C = 85


def probe(config: RunConfig, facts: Facts, folder: Path, nursery: Nursery) -> Iterator[Finding]:
    """Tries everything, one after the other. `folder`: for logs and answers, gone afterwards."""
    trying = _Trying(folder, nursery)
    num_devices = sum(group.replicas * group.processes * group.devices for group in config.role_groups)
    yield from _disk(config, facts, trying)
    yield from _memory(config, facts, trying)
    yield from _limits(config, num_devices)
    yield from _ports(config)
    if num_devices:
        yield from _devices(min(num_devices, facts.num_devices or 0), trying)
    yield from _between(min(num_devices, facts.num_devices or 0), trying)


class _Trying:
    """Starts jobs of `probing.py` and reads what they found."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self._folder, self._nursery = folder, nursery

    def answers(
        self, name: str, jobs: Sequence[Sequence[object]], deadline_s: float, fds: tuple[int, ...] = ()
    ) -> list[dict[str, Any]] | str:
        """Of each job, by its arguments; or in words why there are none. fds: for the first of them."""
        log = self._folder / f"{name}.log"
        places = [self._folder / f"{name}-{number}.json" for number in range(len(jobs))]
        started = [
            Job(f"rondo.launch.check.probing:{name}", (str(place), *map(str, job)), dict(os.environ), log, fds if at == 0 else ())
            for at, (place, job) in enumerate(zip(places, jobs, strict=True))
        ]  # fmt: skip
        try:
            with at_work(f"probes {name}"):
                codes = run_jobs(self._nursery, started, f"probe of {name}", deadline_s)
        except DeadlineExceeded:
            return f"no end within {deadline_s:g} s"
        except WorkerDied as died:
            return str(died)
        if any(codes) or not all(place.exists() for place in places):
            return f"exit codes {', '.join(map(str, codes))}: {' | '.join(LOGS.last_lines(log, num_lines=3)) or 'no output'}"
        return [orjson.loads(place.read_bytes()) for place in places]


def _disk(config: RunConfig, facts: Facts, trying: _Trying) -> Iterator[Finding]:
    """Where the run directory, with its journal and checkpoints, lies."""
    path = next(each for each in (config.run_dir.absolute(), *config.run_dir.absolute().parents) if each.is_dir())
    found = trying.answers("disk", [(path,)], _DISK_S)
    if isinstance(found, str):
        yield error(f"the disk of {path} must take 256 MiB, got {found}. Set run_dir to a folder of another disk")
        return
    [disk] = found
    yield ok(
        f"the disk of {path} takes {show_bytes(int(disk['bytes_s']))}/s, flushed; a flush of 4 KiB takes "
        f"{1000 * disk['flush_s']:.1f} ms, and 99 % of appends less than {1e6 * disk['append_s']:.0f} us"
    )
    if disk["append_s"] > _APPEND_S:
        yield note(
            f"the journal is appended to before anything is admitted, and 1 % of appends take {1000 * disk['append_s']:.1f} ms "
            f"or more in {path}. Set run_dir to a local disk"
        )
    if facts.num_parameters is None:
        return
    size = sum(version_bytes(config, facts.num_parameters, facts.shape).values())
    seconds = size / disk["bytes_s"]
    if seconds > _CHECKPOINT_S:
        yield note(
            f"a checkpoint of {show_bytes(size)} takes about {seconds:.0f} s to write in {path}. Set run_dir to a quicker disk, "
            "or train.save_every so that there are more seconds between two"
        )
    stat = os.statvfs(path)
    kept, free = config.train.keep_checkpoints + 1, stat.f_bavail * stat.f_frsize
    if free < kept * size:
        yield note(
            f"checkpoints take {show_bytes(kept * size)}, train.keep_checkpoints and the one that is written, and the disk "
            f"of {path} has {show_bytes(free)} free. Make room, or lower train.keep_checkpoints: a saving waits for room"
        )


def _memory(config: RunConfig, facts: Facts, trying: _Trying) -> Iterator[Finding]:
    """All shared memory that the run asks for at its start, had once, with its pages."""
    parts = {} if facts.num_parameters is None or facts.num_tensors is None else segment_bytes(
        config, facts.num_parameters, facts.num_tensors, facts.shape
    )  # fmt: skip
    wanted = sum(parts.values()) or config.bus.ring_bytes
    free, whose = free_memory_bytes()
    if wanted > free:
        return  # the check has said so
    found = trying.answers("memory", [(wanted,)], 10 + wanted / _MEMORY_BYTES_S)
    if isinstance(found, str) or found[0]["bytes"] < wanted:
        got = found if isinstance(found, str) else f"{show_bytes(found[0]['bytes'])} before {whose}'s memory ended"
        yield error(
            f"shared memory must give {show_bytes(wanted)} with all pages, got {got}. Raise the limit of the container or job, "
            "end what else runs here, or lower bus.ring_bytes"
        )
        return
    rate = wanted / max(1e-6, found[0]["seconds"])
    yield ok(
        f"shared memory gives {show_bytes(wanted)} with all pages, at {show_bytes(int(rate))}/s, within {whose}'s memory"
    )


def _limits(config: RunConfig, num_devices: int) -> Iterator[Finding]:
    """What the system lets a user have open, and running."""
    num = sum(group.replicas * (group.processes + 2) for group in config.role_groups)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_OF_EACH * num
    found = (note if files < needed else ok, f"{files} files may be open at once, of which the run may need {needed}")
    yield found[0](
        f"{found[1]}. `ulimit -n {2 * needed}`, or LimitNOFILE of the service" if files < needed else found[1]
    )
    needed, left, whose = _THREADS + _THREADS_OF_EACH * num, *_threads_left()
    if left is None:
        yield ok(f"threads and processes have no limit, of which the run may need {needed}")
    elif left < needed:
        yield error(
            f"threads and processes must have room for about {needed}, got {left} by {whose}. Raise it (`ulimit -u`, or "
            "`--pids-limit` of a container)"
        )
    else:
        yield ok(f"{left} threads and processes may be started yet by {whose}, of which the run may need {needed}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if num_devices and locked != resource.RLIM_INFINITY:
        yield note(
            f"{show_bytes(locked)} of memory may be locked (`ulimit -l`), which is too little for InfiniBand. Make it unlimited "
            "where NCCL is to use it"
        )
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    if num_devices > 1 and (shm is None or shm.f_bavail * shm.f_frsize < _SHM_BYTES * num_devices):
        yield note(
            f"NCCL meets in /dev/shm, which has less than {show_bytes(_SHM_BYTES * num_devices)} free. Give the container more "
            "with `--shm-size`, or set NCCL_SHM_DISABLE=1"
        )


def _threads_left() -> tuple[int | None, str]:
    """The least that is left, and what limits it: the user, or a control group."""
    left: list[tuple[int, str]] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid():  # the system holds its administrator to nothing
        mine = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):  # it has ended
                text = status.read_text(errors="replace")
                if re.search(rf"^Uid:\s+{os.getuid()}\s", text, re.MULTILINE):
                    mine += int(text.partition("Threads:")[2].split()[0])
        left.append((soft - mine, "`ulimit -u`"))
    for base in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            with contextlib.suppress(OSError, ValueError):  # there is no such limit, or "max"
                folder = base / line.split(":", 2)[2].strip("/")
                most, now = (int((folder / name).read_text()) for name in ("pids.max", "pids.current"))
                left.append((most - now, f"the control group {folder}"))
    return min(left, default=(None, "nobody"), key=lambda each: each[0])


def _ports(config: RunConfig) -> Iterator[Finding]:
    """What listens is reached: one that is bound and has a firewall before it answers nobody."""
    named = {(config.admin.host, config.admin.port): "admin"}
    endpoint, rollout = config.rollout.endpoint, config.group_of("rollout")
    if endpoint is not None and rollout is not None:
        for at in range(rollout.replicas * rollout.processes if endpoint.port else 1):
            named[endpoint.host, endpoint.port and endpoint.port + at] = "rollout.endpoint"
    named.setdefault(("127.0.0.1", 0), "processes among themselves")
    for (host, port), whose in named.items():
        try:
            through = _through(host, port)
        except OSError as failed:
            yield error(
                f"{host}:{port} of {whose} must be reached from here, got {failed.strerror or failed}. Choose another address or "
                "port, bring the loopback interface up, or let the firewall pass it"
            )
        else:
            yield ok(f"{host}:{through} of {whose} listens and is reached from here")


def _through(host: str, port: int) -> int:
    """The port, when a byte has gone through it. OSError when none has."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as server:
        server.settimeout(_CONNECT_S)
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        with socket.create_connection((address, server.getsockname()[1]), _CONNECT_S) as client:
            taken, _ = server.accept()
            with taken:
                taken.settimeout(_CONNECT_S)
                client.sendall(b".")
                taken.recv(1)
        found: int = server.getsockname()[1]
        return found


def _devices(number: int, trying: _Trying) -> Iterator[Finding]:
    """Whether devices compute right, and what their driver says of them."""
    found = trying.answers("devices", [(number,)], _DEVICES_S)
    if isinstance(found, str):
        yield error(
            f"devices must compute, got {found}. Look at `nvidia-smi`, and restart what holds them, or the machine"
        )
        return
    for at, device in enumerate(found[0]["devices"]):
        name = f"device {at} ({device['name']})"
        if not device["equal"]:
            yield error(f"{name} must compute the same twice, got two products. Take it out with CUDA_VISIBLE_DEVICES")
        taken = device["bytes"] - device["free"]
        yield (note if taken > device["bytes"] / 10 else ok)(
            f"{name} takes {show_bytes(int(device['bytes_s']))}/s from page-locked memory, and has {show_bytes(device['free'])} "
            f"of {show_bytes(device['bytes'])} free. End what else holds it where that is too little"
        )
    fields = "index,temperature.gpu,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.hw_slowdown"
    for index, celsius, errors, slowed in ask_driver("gpu", fields):
        if errors not in ("0", "[N/A]"):
            yield error(
                f"device {index} must have no errors of its memory, got {errors} uncorrected. Reset or replace it"
            )
        if slowed == "Active" or (celsius.isdecimal() and int(celsius) > _HOT_C):
            yield note(
                f"device {index} is slowed down by its hardware, or hot ({celsius} C). See to its cooling and power"
            )


def _between(num_devices: int, trying: _Trying) -> Iterator[Finding]:
    """Between each two devices over NCCL, or, where less than two are asked for, two processes over gloo."""
    backend, size = ("nccl", num_devices) if num_devices > 1 else ("gloo", 2)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]  # the first gets the socket, whose number comes behind its arguments
        jobs = [(backend, rank, size, port, *["-1"] * (rank > 0)) for rank in range(size)]
        found = trying.answers("bandwidth", jobs, _BANDWIDTH_S, fds=(store.fileno(),))
    ways = {
        "nccl": "Run with NCCL_DEBUG=INFO, and look at `nvidia-smi topo -m`",
        "gloo": "Look at the loopback interface",
    }
    if isinstance(found, str):
        yield error(f"{size} processes must reach each other over {backend}, got {found}. {ways[backend]}")
        return
    pairs = {pair: rate for each in found for pair, rate in each["pairs"].items()}
    usual, (slowest, least) = statistics.median(pairs.values()), min(pairs.items(), key=lambda pair: pair[1])
    most = f" to {show_bytes(int(max(pairs.values())))}/s" if len(pairs) > 1 else ""
    yield ok(
        f"{backend} carries {show_bytes(int(least))}/s{most} between two of {size} processes, and "
        f"{show_bytes(int(found[0]['broadcast_s']))}/s from one to all"
    )
    if least < usual / 2:
        yield note(
            f"{backend} carries {show_bytes(int(least))}/s between {slowest.replace('-', ' and ')}, and {show_bytes(int(usual))}"
            f"/s between others. {ways[backend]}"
        )
