"""Estate: what a run owns while it lasts, and leaves no trace of: run-time directory, token, memory, socket, control group,
janitor.

Owns the making of these in the right order and their end in the other. Does not own the run directory, which stays.
The run-time directory lies where cleaners remove what is old: it is locked (`flock`), which systemd-tmpfiles honours, and touched
now and then. Where it is removed all the same, `keep` makes it anew, and each server in it listens again by itself
(`transport.py`).
Invariant: however the run ends, and if this process is killed, no process and no file of the estate is left.

    with Estate(run_dir, longest_name="rollout-0.0", on_register=accept) as estate:
        estate.surroundings.start_service(...)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Set
from pathlib import Path

from rondo.runtime.admin.tokens import write_private
from rondo.runtime.closing import Closing
from rondo.runtime.errors import ConfigError
from rondo.runtime.memory.segments import Registration, SegmentServer
from rondo.runtime.processes.cgroup import Cgroup
from rondo.runtime.processes.janitor import Janitor
from rondo.runtime.processes.process import Stat, children, end_all, orphans
from rondo.runtime.supervision.launcher import Surroundings

_MAX_SOCKET_BYTES = 107
_SWEEP_S = 15.0
_BACKLOG = 4096
_TOUCH_S = 600.0


class Estate(Closing):
    """Made whole or not at all. `longest_name` is the longest "<group>.<rank>" that will have a socket."""

    def __init__(self, run_dir: Path, longest_name: str, on_register: Callable[[Registration], None]) -> None:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as ends:
            self.rt_dir = Path(tempfile.mkdtemp(prefix="rondo-", dir=_folder(longest_name)))
            ends.callback(shutil.rmtree, self.rt_dir, ignore_errors=True)
            self._held, self._touched_at = ends.enter_context(contextlib.ExitStack()), 0.0
            self._lock()
            self._others = {child.pid for child in children(os.getpid())}
            self.cgroup = Cgroup.make(self.rt_dir.name)
            if self.cgroup is not None:
                ends.callback(self.cgroup.remove)
            self.janitor = Janitor(self.rt_dir, self.cgroup)
            ends.callback(self.janitor.close)
            self.token = secrets.token_hex(32)
            write_private(self.rt_dir / "token", self.token)
            self.store_socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
            ends.callback(self.store_socket.close)
            self.segments = SegmentServer(self.rt_dir / "handover.sock", self.token, on_register)
            self.segments.start()
            ends.callback(self.segments.close)
            ends.callback(end_all, self._left, deadline_s=_SWEEP_S)
            host, port = self.store_socket.getsockname()
            self.surroundings = Surroundings(run_dir, self.rt_dir, (host, port), self.cgroup)
            self._ends = ends.pop_all()

    def keep(self) -> None:
        """Makes what somebody has removed of the run-time directory anew. OSError where it cannot be had, or is not ours."""
        try:
            found = self.rt_dir.lstat()
        except FileNotFoundError:
            self.rt_dir.mkdir(0o700)
            found = self.rt_dir.lstat()
            self._lock()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
            raise PermissionError(f"the run-time directory {self.rt_dir} must be this run's own, got somebody else's")
        if not (self.rt_dir / "token").exists():
            write_private(self.rt_dir / "token", self.token)
        if not self.segments.path.exists():
            self.segments.listen_again()
        if time.monotonic() > self._touched_at + _TOUCH_S:
            self._touched_at = time.monotonic()
            for path in (self.rt_dir, *self.rt_dir.rglob("*")):
                with contextlib.suppress(OSError):  # gone meanwhile
                    os.utime(path, follow_symlinks=False)

    def _lock(self) -> None:
        self._held.close()
        self._touched_at = time.monotonic()
        folder = os.open(self.rt_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held.callback(os.close, folder)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def address(self, name: str) -> str:
        """Where the actor of that name listens."""
        return f"unix:{self.rt_dir}/{name}.sock"

    def strays(self, own: Set[int]) -> list[Stat]:
        """What came to this process because whatever was above it was killed: its parents had been told to leave last. `own` are
        the children that it has started since. Children of its own session are somebody else's."""
        return orphans(own | self._others | {self.janitor.pid})

    def _left(self) -> list[Stat]:
        return [stray for stray in self.strays(frozenset()) if stray.alive]

    def close(self) -> None:
        """Ends what still lives, then gives everything back. Safe to call twice."""
        self._ends.close()


def _folder(longest_name: str) -> Path:
    """A temporary folder whose sockets' paths are short enough for the kernel."""
    for folder in (Path(tempfile.gettempdir()), Path("/tmp")):
        if len(os.fsencode(folder / "rondo-12345678" / f"{longest_name}.sock")) <= _MAX_SOCKET_BYTES:
            return folder
    raise ConfigError(
        f"names of role groups must be shorter, got {longest_name!r}: the path of a Unix socket is limited"
    )
