"""Command: a program of somebody else's below a subreaper. Whatever it starts ends when it does, when this process is sent `END`,
or when whoever started this does.

    python -P -m rondo.runtime.processes.command PARENT_PID COMMAND...

Owns the exec. Does not own when the command is to end, or what it is given.
"""

from __future__ import annotations

import os
import signal
import sys

from rondo.runtime.processes.subreaper import keep

NOT_STARTED = 127


def main(parent: str, *command: str) -> None:
    keep(int(parent), ())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the command
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main(*sys.argv[1:])
