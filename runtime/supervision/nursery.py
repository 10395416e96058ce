"""Nursery: a process that has loaded torch and what the roles import, once, and of which they and the store are forked.

    supervisor  --- a socket a job: function, arguments, environment, log --->  nursery  (all loaded, one thread, nothing running)
        ^                                                                         | fork
        |  <--- adopts, as subreaper ---  root of actor-0, which forks workers <--'  fork, then the one between ends
        '------ pid; then begins when told to, and ends if its socket does

Loading torch and transformers takes seconds of a core, and each process would do it for itself, at the start and whenever its
role group comes back. A forked one is there in milliseconds and shares the memory of what was loaded.

Owns the nursery's process, and how a job becomes a child of the supervisor: with a session, an environment and a log of its own,
dying with the supervisor. Does not own what is started, or when. It begins before its run: the first job is the check of the
settings, and only where that finds no fault is there a run to belong to.

Orders are done one after another: a job waits until all is loaded that was told before it.

Invariants: a fork is whole: where the nursery has more than one thread, or CUDA is in use, a job is started anew (`exec`) and
told why; what `start` returns is a child of this process; a job whose start was given up never begins; a nursery that died or
stands still is replaced with the next job, and its silence blocks nobody.

    with Nursery() as nursery:
        nursery.belong(surroundings.place(NAME, attempt=0), modules=["rondo.roles.actor"])
        nursery.open()                                              # or else with the first job
        main = await nursery.start(surroundings.group_job(spec, incarnation=1, attempt=0, limits=config.supervision))
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rondo.runtime.closing import Closing
from rondo.runtime.errors import DeadlineExceeded, WorkerDied
from rondo.runtime.processes.guard import PARENT_PID, die_with_parent
from rondo.runtime.processes.process import exit_text, over
from rondo.runtime.records.logs import LOGS
from rondo.runtime.reference import load_reference
from rondo.runtime.supervision.launcher import STORE_MAIN, TORCHRUN_MAIN, Job, start
from rondo.runtime.supervision.proxy import NOT_FORKED
from rondo.runtime.supervision.root import why_not_fork
from rondo.runtime.waits import waiting

NAME = "nursery"
ANSWER_S = 30.0
"""A fork takes milliseconds."""
_LAST_S = 1.0
_PAUSE_S = 0.005
_GO = b"\n"
_MOST_BYTES, _MOST_FDS = 1 << 16, 8
_JOB = "--job"
_COMMAND = (sys.executable, "-P", __file__)
"""By its path: below `python -m` lie frames of no module, for which torchrun, which looks at its stack, searches all modules."""


Place = Callable[[int], tuple[Path, Mapping[str, str]]]
"""Log and environment of a nursery's process, by its number."""


class Forked:
    """A child of this process that another one forked: as much of a `subprocess.Popen` as its owner needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended, as a Popen says it; None while it lives."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        """Blocks until it has ended."""
        code = self._collect(0)
        assert code is not None
        return code

    async def ended(self) -> int:
        """Waits for its end, however long it takes, and returns how it ended."""
        await over(self.pid)
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # it was not collected: its pid is nobody else's
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Nursery(Closing):
    """The supervisor's side. For the main thread, and the event loops that run on it, in a process that is a subreaper."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._modules: tuple[str, ...] = ()
        self._load_s = 0.0
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._loads = self._loaded = 0
        """How often it was told to load, and how often it is known to have done so."""

    def belong(self, place: Place, modules: Sequence[str] = (), load_s: float = 600.0) -> None:
        """From now on its processes belong there. `modules` are what to load beside torch; one that is not there is passed over.
        `load_s` limits the loading, from a cold network disk perhaps."""
        self._place, self._modules, self._load_s = place, tuple(modules), load_s
        if self._orders is not None:  # else the next job opens one, which belongs there
            self._log, _ = place(self._number)
            self._loads += 1
            with (
                contextlib.suppress(OSError),
                LOGS.open(self._log) as log,
            ):  # it has ended: the next job opens another one
                socket.send_fds(self._orders, [json.dumps(self._modules).encode()], [log])

    @property
    def pids(self) -> dict[str, int]:
        """Of its own process, by its name, where there is one."""
        return {} if self._process is None else {NAME: self._process.pid}

    async def start(self, job: Job) -> Forked:
        """The job's process, which has begun. Cancelled before that, nothing ever begins. WorkerDied when it cannot be had: the
        next call tries a new nursery."""
        if self._process is None or self._process.poll() is not None:
            self.open()
        assert self._orders is not None and self._process is not None
        loop, asked, loads = asyncio.get_running_loop(), self._process, self._loads
        name, deadline_s = ("fork", ANSWER_S) if loads == self._loaded else ("start of nursery", self._load_s)
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs, LOGS.open(job.log) as log:
                try:
                    socket.send_fds(self._orders, [_GO], [theirs.fileno(), log, *job.fds])
                except OSError:  # it has ended, or has read nothing for hundreds of jobs
                    raise await self._died(asked) from None
            try:
                async with waiting(name, peer=NAME, deadline_s=deadline_s):
                    await loop.sock_sendall(ours, json.dumps(asdict(job) | {"log": -1}).encode() + b"\n")
                    answer = await loop.sock_recv(ours, 64)
            except ConnectionError:
                answer = b""
            except DeadlineExceeded:
                raise await self._died(asked, silent=True) from None
            if not answer:
                raise await self._died(asked)
            self._loaded = max(self._loaded, loads)
            try:
                ours.send(_GO)
            except ConnectionError:
                raise WorkerDied(f"what was forked must live to begin, got the end of pid {answer.decode()}") from None
        return Forked(int(answer))

    def open(self) -> None:
        """Begins to load, at once; a nursery that was open is replaced."""
        self.close()
        assert self._place is not None, "a nursery belongs somewhere before it starts anything"
        self._number += 1
        self._loads += 1
        self._log, environment = self._place(self._number)
        self._orders, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with theirs:
            command = [*_COMMAND, str(theirs.fileno()), *self._modules]
            # Threads that have nothing to do sleep, unless the user says otherwise: cores are shared with other roles.
            # Whether there is a GPU is asked of the driver's management library while modules load: asking CUDA would begin it.
            environment = {
                "OMP_WAIT_POLICY": "PASSIVE", **environment, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }  # fmt: skip
            self._process = start(command, environment, self._log, [theirs.fileno()])

    def close(self) -> None:
        """Ends the nursery; what was forked of it goes on. Safe to call twice."""
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # held in the kernel: whoever collects strays collects it
                self._process.wait(_LAST_S)
        self._process = self._orders = None

    async def _died(self, asked: subprocess.Popen[bytes], *, silent: bool = False) -> WorkerDied:
        """`asked` did not answer: nothing that it may still do counts, and it is ended."""
        how = "silence"
        with contextlib.suppress(DeadlineExceeded):
            if not silent:  # its sockets close a moment before it has ended
                how = exit_text(await _end_of(asked))
        asked.kill()
        with contextlib.suppress(DeadlineExceeded):
            await _end_of(asked)
        lines = "\n".join(LOGS.last_lines(self._log))
        return WorkerDied(
            f"the nursery must start what it is told, got {how}. Read {self._log}; it ends with:\n{lines}"
        )


async def _end_of(nursery: subprocess.Popen[bytes]) -> int:
    async with waiting("end of nursery", peer=NAME, deadline_s=_LAST_S):
        while (code := nursery.poll()) is None:  # noqa: ASYNC110 - a moment
            await asyncio.sleep(_PAUSE_S)
    return code


# ---- the process ----------------------------------------------------------------------------------------------------


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Loads and forks as the orders on the socket say; returns a job in the process that is to do it, and None at their end."""
    supervisor = os.getppid()
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, _MOST_FDS)
        if not order:
            return None
        if order != _GO:
            _write_to(*descriptors)
            load(json.loads(order))
            continue
        reason = why_not_fork()
        if not _forked_for(supervisor):
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        orders.close()
        if not reason:
            return _job(*descriptors)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        os.environ[PARENT_PID] = str(supervisor)
        numbers = ",".join(map(str, descriptors))
        os.execv(sys.executable, [*_COMMAND, _JOB, numbers, reason])


def _job(told: int, log: int, *descriptors: int) -> dict[str, Any] | None:
    """What this process is to do; None where it is to begin nothing, since whoever asked has given it up."""
    with socket.socket(fileno=told) as asked, asked.makefile("rb") as lines, contextlib.suppress(ConnectionError):
        line = lines.readline()
        if line:
            asked.sendall(str(os.getpid()).encode())
        if line and lines.read(1):
            job: dict[str, Any] = json.loads(line)
            return job | {"log": log, "fds": descriptors}
    return None


def _forked_for(supervisor: int) -> bool:
    """Whether this is a new process: a child of the supervisor that dies with it."""
    between = os.fork()
    if between != 0:
        os.waitpid(between, 0)
        return False
    itself = os.pidfd_open(os.getpid())
    if os.fork() != 0:
        os._exit(0)
    select.select([itself], [], [], ANSWER_S)  # readable once the one between has ended and its child has a new parent
    os.close(itself)
    die_with_parent(supervisor)  # ends this process where that is another
    return True


def become(job: dict[str, Any]) -> NoReturn:
    """Does a job as if this process had been started for it, but for its end (`_leave`)."""
    os.setsid()
    _write_to(job["log"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.environ[PARENT_PID] = str(os.getpid())
    sys.argv[1:] = [*job["arguments"], *map(str, job["fds"])]
    code: object = 1
    try:
        load_reference(job["call"], "a job")()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001  # the log has it, and this process ends
        traceback.print_exc()
    _leave(code if isinstance(code, int) else 1)


def _leave(code: int) -> NoReturn:
    """At once: taking down all that was loaded takes a second, in which who asks finds a process that answers nobody."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_to(log: int) -> None:
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def load(modules: Sequence[str]) -> None:
    """Imports what is to be shared, which is never walked by the garbage collector."""
    gc.disable()
    for call in (TORCHRUN_MAIN, STORE_MAIN):
        load_reference(call, "a job")
    for name in ("rondo.runtime.worker.worker", *modules):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # whoever needs it loads it for itself, and says what it lacks
            print(f"{name} is not loaded for all: {type(error).__name__}: {error}", flush=True)
    gc.freeze()
    gc.enable()


def main() -> None:
    die_with_parent()
    try:
        if sys.argv[1] == _JOB:
            job = _job(*map(int, sys.argv[2].split(",")))
            if job is not None:
                job["environment"][NOT_FORKED] = sys.argv[3]
        else:
            load(sys.argv[2:])
            with socket.socket(fileno=int(sys.argv[1])) as orders:
                job = serve(orders)
    except Exception:  # noqa: BLE001  # the log has it, and a new one takes its place
        traceback.print_exc()
        _leave(1)
    if job is not None:
        become(job)
    _leave(0)


if __name__ == "__main__":
    main()
