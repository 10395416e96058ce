"""Root: the process above everything of one life of a role group. A job of the nursery: SOCKET TORCHRUN_ARGUMENTS...

    supervisor -> root -> torchrun -> proxy, one a rank: asks for its worker, and ends as that ends
                    '---> worker, one a rank, in a session of its own -> whatever it starts

Owns two promises. Workers are forked of a process that has loaded what they need, with one thread and without CUDA. And nothing
of this life outlives it: the root is a subreaper, so whatever leaves its session, its parent or its environment stays below it,
and the root leaves last, when all of it is dead; also when the supervisor dies. Does not own when a life ends.

A worker is started anew (`exec`) instead where a fork would not be whole, and says why in an event `not_forked`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rondo.runtime.processes import process
from rondo.runtime.processes.guard import PARENT_DIED, PARENT_PID, die_with_parent
from rondo.runtime.reference import load_reference
from rondo.runtime.supervision.launcher import TORCHRUN_MAIN
from rondo.runtime.supervision.proxy import EXEC, end_as

_WORDS_S = 10.0
"""A proxy has its whole request at hand."""


def why_not_fork() -> str:
    """Why a fork of this process would not be whole; empty where it would."""
    threads = sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        return f"a fork copies one thread alone, and there are {len(threads)}: {', '.join(threads)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use, which no fork can share"
    return ""


class Root:
    """The loop of the process; `torchrun` is its pid."""

    def __init__(self, listener: socket.socket, torchrun: int, wake: int) -> None:
        self._listener, self._torchrun = listener, torchrun
        self._workers: dict[int, socket.socket | None] = {}
        """By pid, with their proxies. They are left for the supervisor to collect, which so learns how each ended."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        """Returns in every worker what its proxy has handed over. The root itself ends here, as torchrun ended, and last."""
        while True:
            status = self._look()
            if status is not None:
                self._end(status)
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError, ValueError):  # a proxy that was killed while it asked
                        rank = self._fork()
                        if rank is not None:
                            return rank
                elif isinstance(key.data, int):  # a proxy is gone: so is its rank
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
                else:
                    os.read(key.fd, 1024)

    def _fork(self) -> dict[str, Any] | None:
        """What a worker is to be, in that worker; None here."""
        proxy, _ = self._listener.accept()
        proxy.settimeout(_WORDS_S)
        with proxy.makefile("rb") as lines:
            rank: dict[str, Any] = json.loads(lines.readline())
        if reason := why_not_fork():
            with proxy:
                proxy.sendall(EXEC + reason.encode())
            return None
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            for connection in (self._listener, proxy, *self._workers.values()):
                if connection is not None:
                    connection.close()
            return rank
        self._workers[pid] = proxy
        self._selector.register(proxy, selectors.EVENT_READ, pid)
        return None

    def _look(self) -> int | None:
        """Tells proxies of ended workers and collects what else has ended; torchrun's wait status once it has one."""
        for found in process.children(os.getpid()):
            if found.alive:
                continue
            if found.pid == self._torchrun:
                return os.waitpid(found.pid, 0)[1]
            if found.pid not in self._workers:
                os.waitpid(found.pid, 0)
                continue
            proxy, self._workers[found.pid] = self._workers[found.pid], None
            if proxy is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(proxy)
                with proxy, contextlib.suppress(OSError):
                    proxy.sendall(str(found.exit_status & 0xFFFF).encode())
        return None

    def _end(self, status: int) -> NoReturn:
        process.end_below()
        end_as(status)


@contextlib.contextmanager
def _woken() -> Iterator[int]:
    """A descriptor that is readable once a child has ended. When the supervisor dies, all ends."""
    supervisor = os.getppid()

    def leave(*_: object) -> None:
        if os.getppid() != supervisor:
            process.end_below()
            os._exit(1)

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(PARENT_DIED, leave)
    try:
        yield read
    finally:  # in what was forked
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, PARENT_DIED):
            signal.signal(number, signal.SIG_DFL)
        os.close(read)
        os.close(write)


def main() -> None:
    path, *arguments = sys.argv[1:]
    root = os.getpid()
    process.set_child_subreaper()
    listener = socket.socket(socket.AF_UNIX)
    Path(path).unlink(missing_ok=True)
    listener.bind(path)
    listener.listen()
    with _woken() as wake:
        die_with_parent(number=PARENT_DIED)
        torchrun = os.fork()
        rank = None if torchrun == 0 else Root(listener, torchrun, wake).serve()
    listener.close()
    die_with_parent(root)
    if rank is None:
        os.environ[PARENT_PID] = str(os.getpid())
        sys.argv[1:] = arguments
        load_reference(TORCHRUN_MAIN, "a job")()
        return
    os.setsid()
    os.environ.clear()
    os.environ.update(rank["environment"] | {PARENT_PID: str(root)})
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # else whatever is forked draws the same numbers; Python's own generator sees to that itself
    from rondo.runtime.worker import worker

    worker.main(rank["roles"])
