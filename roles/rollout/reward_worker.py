"""The process that runs a user's reward function, so that whatever the function does, only this process suffers.

Owns the loop of one worker: read a frame, score its items one by one, write a frame. Does not own deadlines or restarts
(`rewards.py`, its parent). Imports the standard library and orjson, and what the user's module imports.

    parent -> [request, [[response, label, prompt, metadata], ...]]         frames: 4 bytes of length, then JSON
    worker -> [request, [[score | null, details, error | null], ...]]       first of all: [0, null] or [0, error text]

Before each item the worker notes (request, item, start time) where its parent can read it when it must kill:
`os.pwrite` into a memfd, 0.6 us. Frames have a socket of their own: what the function prints goes to standard error,
its standard input is empty. The process dies with its parent, also while the function hangs.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import orjson

from rondo.runtime.guard import die_with_parent
from rondo.runtime.reference import load_reference

LENGTH = struct.Struct("<I")
NOTE = struct.Struct("<QqqQ")
"""Request, item, start in nanoseconds of the monotonic clock, request again: unequal ends were read while written."""

_MAX_ERROR_CHARACTERS = 4000


def main(arguments: list[str]) -> int:
    """`reward_worker SOCKET_FD NOTE_FD PARENT_PID FUNCTION`: serves until the parent closes the socket."""
    socket_fd, note_fd, parent = map(int, arguments[:3])
    die_with_parent(parent)
    os.dup2(2, 1)
    for fd in (socket_fd, note_fd):
        os.set_inheritable(fd, False)
    with socket.socket(fileno=socket_fd) as link:
        try:
            function = load_reference(arguments[3], "reward.function")
        except (Exception, SystemExit):  # noqa: BLE001 - the user's module may raise anything; the parent reports it
            _send(link, [0, _error_text()])
            return 1
        _send(link, [0, None])
        while (frame := _receive(link)) is not None:
            request, items = frame
            _send(link, [request, [_score(function, item, note_fd, request, i) for i, item in enumerate(items)]])
    return 0


def _score(function: Callable[..., Any], item: list[Any], note_fd: int, request: int, index: int) -> list[Any]:
    response, label, prompt, metadata = item
    os.pwrite(note_fd, NOTE.pack(request, index, time.monotonic_ns(), request), 0)
    try:
        score, details = checked(function(response, label, prompt=prompt, metadata=metadata))
    except (Exception, SystemExit):  # noqa: BLE001 - whatever the user's function raises is this item's error
        return [None, {}, _error_text()]
    return [score, details, None]


def checked(value: Any) -> tuple[float, dict[str, Any]]:
    """(score, details) of what a reward function returned. TypeError or ValueError for what is no finite number."""
    details: dict[str, Any] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"reward must return a dict with 'score', got the keys {', '.join(map(str, value))}")
        details = {str(name): detail for name, detail in value.items() if name != "score"}
        details = orjson.loads(orjson.dumps(details, default=repr, option=orjson.OPT_SERIALIZE_NUMPY))
        value = value["score"]
    if not hasattr(value, "__float__"):
        raise TypeError(f"reward must return a number or a dict with 'score', got {value!r}")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"reward must return a finite number, got {score}")
    return score, details


def _error_text() -> str:
    """The traceback of the error being handled, from the user's first frame on; its end where it is long."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _OWN_MODULES and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _MAX_ERROR_CHARACTERS else "..." + text[-_MAX_ERROR_CHARACTERS:]


_OWN_MODULES = {__name__, "rondo.runtime.reference", "importlib._bootstrap", "importlib._bootstrap_external"}


def _send(link: socket.socket, message: Any) -> None:
    body = orjson.dumps(message)
    link.sendall(LENGTH.pack(len(body)) + body)


def _receive(link: socket.socket) -> Any:
    head = _read(link, LENGTH.size)
    body = None if head is None else _read(link, LENGTH.unpack(head)[0])
    return None if body is None else orjson.loads(body)


def _read(link: socket.socket, num_bytes: int) -> bytearray | None:
    """Exactly so many bytes, or None when the parent has closed its end."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = link.recv_into(view)
        if received == 0:
            return None
        view = view[received:]
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
