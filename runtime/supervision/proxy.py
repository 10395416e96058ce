"""Proxy: what torchrun starts in the place of a rank. `python -I -S proxy.py SOCKET ROLE_CLASS...`

The worker itself is forked of the group's root (`root.py`), which has loaded torch, transformers and the roles: it is there in
milliseconds where an `exec` would import for seconds. The proxy hands over the environment that torchrun gave it, waits, and
ends as the worker ended, so that torchrun sees what it would have seen. Told to, it becomes the worker itself.

It has no ears for SIGTERM, which torchrun sends when another rank has died (`guard.py`): the supervisor ends the group. Standard
library only, and run by its path: it starts in 15 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

EXEC = b"exec "
"""The root's answer that the worker has to be started anew, followed by the reason."""
NOT_FORKED = "RONDO_NOT_FORKED"
"""The environment variable in which such a worker finds the reason."""
_PR_SET_PDEATHSIG = 1


def end_as(status: int) -> NoReturn:
    """Ends this process as another one ended, of which this is the wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def main(path: str, roles: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # torchrun's end is this one's
    with socket.socket(socket.AF_UNIX) as root:
        root.connect(path)
        root.sendall(json.dumps({"environment": dict(os.environ), "roles": list(roles)}).encode() + b"\n")
        answer = b""
        while chunk := root.recv(4096):
            answer += chunk
    if answer.startswith(EXEC):
        os.environ[NOT_FORKED] = answer.removeprefix(EXEC).decode()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "rondo.runtime.worker.worker", *roles])
    end_as(int(answer) if answer else 1 << 8)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
