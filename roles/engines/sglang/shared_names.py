"""The names in shared memory of one server's processes, and their end when the server is killed.

SGLang's processes take their names away when they leave. Killed ones leave them: semaphores, and blocks with media on their way
to the scheduler. Those of a server that rondo starts begin with a name of its own, or hold the pid of one of its processes. Owns
the file that says so, and their removal.

    /dev/shm/rondo_server_7_1f2e                       locked as long as its server may live; holds the pids of its processes
    /dev/shm/sem.rondo_server_7_1f2e-k2j4              a semaphore
    /dev/shm/sgl_shm_mm_4711_8c1d                      a block that process 4711 made

    names = SharedNames()                              # also ends what servers left that were killed with their rollout process
    command = [python, *names.begin, "sglang.launch_server", ...]
    names.saw([4711, 4712])
    names.remove()                                     # no process of the server lives

Invariant: a name is removed only when it is ours by its own words, and the lock (`owned.py`) says that its server is gone; a
block besides only when its process is dead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rondo.roles.engines.sglang.owned import FOLDER, abandoned, give_name, unnamed
from rondo.runtime.processes.process import stat

_PREFIX = "rondo_server_"
_BEGIN = (
    "import multiprocessing.process as own, runpy, sys; own.current_process()._config['semprefix'] = sys.argv.pop(1); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""As `-m`, in a process whose semaphores, and those of all it starts, are named as its first argument says."""


class SharedNames:
    """Those of one server, from before its start until its end."""

    def __init__(self) -> None:
        for path, file in abandoned(_PREFIX):
            _remove(path, map(int, os.pread(file, 1 << 16, 0).split()))
        self._file = unnamed()
        self._path = give_name(self._file, _PREFIX)
        self._pids: set[int] = set()

    @property
    def begin(self) -> tuple[str, ...]:
        """Of a Python's command line, before the module that it runs."""
        return "-c", _BEGIN, f"/{self._path.name}"

    def saw(self, pids: Iterable[int]) -> None:
        """These are processes of the server."""
        self._pids |= set(pids)
        os.pwrite(self._file, " ".join(map(str, sorted(self._pids))).encode(), 0)

    def remove(self) -> None:
        """All of them; once."""
        _remove(self._path, self._pids)
        os.close(self._file)


def _remove(owner: Path, pids: Iterable[int]) -> None:
    found = list(FOLDER.glob(f"sem.{owner.name}-*"))
    for pid in pids:
        now = stat(pid)
        # A live one is another process by now, with the same number; a zombie only waits for its parent to ask how it ended.
        if now is None or not now.alive:
            found += FOLDER.glob(f"sgl_shm_*_{pid}_*")
    for path in (*found, owner):
        path.unlink(missing_ok=True)
