"""Nursery: a process that has loaded torch once, and of which torchruns and the store are forked.

    supervisor  --- job: function, arguments, environment, log --->  nursery  (torch loaded, one thread, nothing running)
        ^                                                              | fork
        |  <--- adopts, as subreaper ---  torchrun of actor-0      <---'  fork, then the one between ends
        '------ pid ------------------------------------------------------'

Loading torch takes seconds of a core, and each torchrun would do it for itself, at the start and whenever its role group comes
back. A forked one is there in milliseconds and shares the memory of what was loaded.

Owns the nursery's process, and how a job becomes a child of the supervisor: with a session, an environment and a log of its own,
dying with the supervisor. Does not own what is started, or when. What a job starts in its turn is started as ever (`exec`).

Invariants: the nursery never starts a thread, so a fork of it is whole; what `start` returns is a child of this process; a
nursery that died is replaced with the next job.

    with Nursery(surroundings, attempt=0, keep=[store_fd]) as nursery:
        main = await nursery.start(surroundings.group_job(spec, incarnation=1, attempt=0, grace_s=30))
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rondo.runtime.errors import WorkerDied
from rondo.runtime.guard import PARENT_PID, die_with_parent
from rondo.runtime.launcher import STORE_MAIN, TORCHRUN_MAIN, Job, Surroundings, start
from rondo.runtime.process import exit_text
from rondo.runtime.record import last_lines
from rondo.runtime.reference import load_reference
from rondo.runtime.waits import waiting

NAME = "nursery"
_LOAD_LIMIT_S = 600.0
"""Importing torch from a cold network disk takes minutes."""
_ANSWER_S = 10.0
_LAST_S = 1.0
_END_S = 60.0


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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # it was not collected: its pid is nobody else's
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Nursery:
    """The supervisor's side. For the main thread's event loop, in a process that is a subreaper.

    `keep` are descriptors that jobs may have; no job has others than those it names.
    """

    def __init__(self, around: Surroundings, attempt: int, keep: Sequence[int] = ()) -> None:
        self._around, self._attempt, self._keep = around, attempt, tuple(keep)
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._loading: asyncio.Task[None] | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Of its own process, by its name, where there is one."""
        return {} if self._process is None else {NAME: self._process.pid}

    async def start(self, job: Job) -> Forked:
        """The job's process. Cancelled while the nursery loads, nothing was started. WorkerDied and DeadlineExceeded when it
        cannot be had: the next call tries a new nursery."""
        if self._loading is None or (self._loading.done() and self._ended()):
            self.close()
            self._loading = self._open()
        await asyncio.shield(self._loading)
        return self._ask(job)

    def close(self) -> None:
        """Ends the nursery; what was forked of it goes on. Safe to call twice."""
        if self._loading is not None:
            self._loading.cancel()
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
        self._process = self._orders = self._loading = None

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _open(self) -> asyncio.Task[None]:
        self._number += 1
        self._log = self._around.log_path(NAME, self._number, self._attempt)
        self._orders, theirs = socket.socketpair()
        self._orders.setblocking(False)
        with theirs:
            descriptors = [theirs.fileno(), *self._keep]
            command = [sys.executable, "-m", "rondo.runtime.nursery", *map(str, descriptors)]
            environment = self._around.environment(NAME, self._number, self._attempt)
            self._process = start(command, environment | {"OMP_NUM_THREADS": "1"}, self._log, descriptors)
        loading = asyncio.get_running_loop().create_task(self._loaded(self._orders), name="start of nursery")
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())  # those who wait are told
        return loading

    async def _loaded(self, orders: socket.socket) -> None:
        async with waiting("start of nursery", peer=NAME, deadline_s=_LOAD_LIMIT_S):
            try:
                word = await asyncio.get_running_loop().sock_recv(orders, 1)
            except ConnectionError:
                word = b""
        if not word:
            raise self._died()

    def _ask(self, job: Job) -> Forked:
        """Blocks for the milliseconds of a fork, so that nobody can give up in the middle."""
        if self._orders is None:
            raise self._died()
        self._orders.settimeout(_ANSWER_S)
        try:
            self._orders.sendall(json.dumps(asdict(job) | {"log": str(job.log)}).encode() + b"\n")
            answer = self._orders.recv(64)
        except OSError:
            answer = b""
        if not answer:
            raise self._died()
        return Forked(int(answer))

    def _died(self) -> WorkerDied:
        how = "silence"
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its socket closes a moment before it has ended
                how = exit_text(self._process.wait(_LAST_S))
            self._process.kill()
            self._process.wait(_END_S)
        lines = "\n".join(last_lines(self._log))
        return WorkerDied(
            f"the nursery must start what it is told, got {how}. Read {self._log}; it ends with:\n{lines}"
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---- the process ----------------------------------------------------------------------------------------------------


def serve(orders_fd: int, keep: Sequence[int]) -> dict[str, Any] | None:
    """Forks for every job on the socket; returns it in the process that is to do it, and None at the socket's end."""
    for descriptor in (orders_fd, *keep):
        os.set_inheritable(descriptor, False)
    supervisor = os.getppid()
    with socket.socket(fileno=orders_fd) as orders, orders.makefile("rb") as lines:
        orders.sendall(b"\n")
        for line in lines:
            pid = _fork_for(supervisor)
            if pid == 0:
                job: dict[str, Any] = json.loads(line)
                for descriptor in {*keep} - {*job["fds"]}:
                    os.close(descriptor)
                return job
            orders.sendall(str(pid).encode())
    return None


def _fork_for(supervisor: int) -> int:
    """0 in a new process, a child of the supervisor that dies with it; its pid here, once it is that."""
    read, write = os.pipe()
    between = os.fork()
    if between != 0:
        os.close(write)
        with os.fdopen(read, "rb") as told:
            os.waitpid(between, 0)
            return int(told.read())
    itself = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid != 0:
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(read)
    os.close(write)
    select.select([itself], [], [], _ANSWER_S)  # readable once the one between has ended and its child has a new parent
    os.close(itself)
    die_with_parent(supervisor)  # ends this process where that is another
    return 0


def become(job: dict[str, Any]) -> None:
    """Does a job as if this process had been started for it."""
    os.setsid()
    output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.environ[PARENT_PID] = str(os.getpid())
    sys.argv[1:] = job["arguments"]
    load_reference(job["call"], "a job")()


def main() -> None:
    die_with_parent()
    for call in (TORCHRUN_MAIN, STORE_MAIN):
        load_reference(call, "a job")
    gc.freeze()  # what was loaded stays shared with what is forked
    orders_fd, *keep = map(int, sys.argv[1:])
    job = serve(orders_fd, keep)
    if job is not None:
        become(job)


if __name__ == "__main__":
    main()
