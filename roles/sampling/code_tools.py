"""Tools with names, which run code of the policy in the sandbox: `environment.tools` takes "python" and "shell".

Owns what the policy is told of what it ran. Does not own what that may do (`runtime/sandbox/`). Each call has a folder of its
own: what one leaves behind no other finds.
"""

from __future__ import annotations

import asyncio

from rondo.runtime.sandbox.sandbox import Ran, sandbox

NAMES = ("python", "shell")
_TOLD = 8192
"""Characters of an answer; the middle of a longer one is left out."""


def python(code: str) -> str:
    """Runs a Python program and returns what it prints. Nothing is kept between calls.

    Args:
        code: the program
    """
    return told(ran({"main.py": code.encode(errors="replace")}, ["python", "main.py"]))


def shell(command: str) -> str:
    """Runs a shell command and returns what it prints. Nothing is kept between calls.

    Args:
        command: the command
    """
    return told(ran({"main.sh": command.encode(errors="replace")}, ["sh", "main.sh"]))


def ran(files: dict[str, bytes], command: list[str]) -> Ran:
    return asyncio.run(sandbox().run(files, command))


def told(ran: Ran) -> str:
    """What the policy is told of it."""
    ended = f"exit code {ran.exit}" if ran.exit else ""
    if ran.why is not None:
        ended = f"ended for its {ran.why}"
    end = ended and f"Error: {ended}"
    return "\n".join(each for each in (_short(ran.output.rstrip()), _short(ran.errors.rstrip()), end) if each)


def _short(text: str) -> str:
    half = _TOLD // 2
    return text if len(text) <= _TOLD else f"{text[:half]}\n[{len(text) - _TOLD} characters]\n{text[-half:]}"
