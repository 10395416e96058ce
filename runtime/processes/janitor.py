"""Janitor: what is left when the supervisor is killed itself. `python -m rondo.runtime.processes.janitor RT_DIR [CGROUP]`

Owns the last sweep. The supervisor starts it, holds the other end of its standard input, and never writes: when that
pipe closes, the run is over, in whatever way. Then every process of the run that still lives is SIGKILLed, and the run-time
directory removed. The guard's promise and the roots of role groups, which leave last, end almost all of them before; this finds
what slipped through: all that is in the run's control group, where it has one (CGROUP), else, with all below it, what shows the
run in its environment, which is all that is left to go by when whatever stood above it was killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rondo.runtime.processes.cgroup import Cgroup
from rondo.runtime.processes.guard import module_command
from rondo.runtime.processes.process import end_all, scan

_SWEEP_S = 30.0


class Janitor:
    """The supervisor's side: starts the process, and later waits for it."""

    def __init__(self, rt_dir: Path, cgroup: Cgroup | None = None) -> None:
        group = () if cgroup is None else (str(cgroup.path),)
        self._process = subprocess.Popen(
            module_command("rondo.runtime.processes.janitor", str(rt_dir), *group),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """The run is over: waits until the sweep is done. Safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SWEEP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def swept_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder that is gone with this process, however that ends."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    janitor = Janitor(folder)
    try:
        yield folder
    finally:
        janitor.close()


def main(rt_dir: str, cgroup: str | None = None) -> int:
    """1 when something could not be ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves when the run has left, not before
    while os.read(0, 4096):
        pass
    if cgroup is not None:
        group = Cgroup(Path(cgroup))
        left = not group.end(deadline_s=_SWEEP_S / 2)
        group.remove()
    else:
        left = bool(end_all(lambda: scan({f"RONDO_RT_DIR={rt_dir}".encode()}), deadline_s=_SWEEP_S / 2))
    shutil.rmtree(rt_dir, ignore_errors=True)
    return 1 if left or Path(rt_dir).exists() else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
