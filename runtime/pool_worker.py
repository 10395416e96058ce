"""The process that runs a function for a `Pool`, so that whatever the function does, only this process suffers.

Owns the loop of one worker: read a frame, run its items one by one, write a frame. Does not own deadlines or restarts
(`pool.py`, its parent). Imports the standard library and orjson; numpy once an array or bytes come along, and what the function
brings.

    parent -> [request, [item, ...]]                                   an item is a value
    worker -> [request, [[value, error | null, kind | null], ...]]     first of all: [0, [[null, null, null]]], or its error

A frame is a length, an orjson header and raw buffers. A value of JSON stands in the header; one with arrays or bytes in it
stands in buffers of the frame: its own header and what that refers to (`transport.pack`). Nothing is pickled.

Before each item, and behind the last, the worker notes (request, item, start time) where its parent can read it when it must
kill: `os.pwrite` into a memfd, 0.6 us. Frames have a socket of their own: what the function prints goes to standard error, its
standard input is empty. The process dies with its parent, also while the function hangs.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from rondo.runtime.errors import OutOfSpace, RondoError
from rondo.runtime.guard import die_with_parent
from rondo.runtime.reference import load_reference, uncollected

PREFIX = struct.Struct("<QI")
"""Bytes of the header, number of buffers; the buffers' sizes follow, 8 bytes each, then the header, then the buffers."""
NOTE = struct.Struct("<QqqQ")
"""Request, item, start in nanoseconds of the monotonic clock, request again: unequal ends were read while written."""

Buffer = bytes | bytearray | memoryview
Parts = list[Buffer]
"""A value with arrays or bytes: its header, then its buffers."""

_MAX_ERROR_CHARACTERS = 4000


def main(arguments: list[str]) -> int:
    """`pool_worker SOCKET_FD NOTE_FD PARENT_PID MAX_BYTES OPEN SETTINGS`: serves until the parent closes the socket.

    OPEN names a function; what it returns for the JSON object SETTINGS (as keywords) is the function that items are given to.
    MAX_BYTES bounds the arrays and bytes that it may return for one.
    """
    socket_fd, note_fd, parent, max_bytes = map(int, arguments[:4])
    die_with_parent(parent)
    os.dup2(2, 1)
    for fd in (socket_fd, note_fd):
        os.set_inheritable(fd, False)
    with socket.socket(fileno=socket_fd) as link:
        try:
            with uncollected():
                open_function = load_reference(arguments[4], "the function of a pool")
                _own_modules.add(open_function.__module__)
                function = open_function(**orjson.loads(arguments[5]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what it loads may raise anything; the parent reports it
            _send(link, 0, [_failed(error, with_cause=True)])
            return 1
        gc.freeze()  # what was loaded stays: it is walked neither between items nor at the end of the process
        _send(link, 0, [(None, None, None)])
        while (frame := _receive(link)) is not None:
            request, items = frame
            answers = []
            for index, item in enumerate(items):
                os.pwrite(note_fd, NOTE.pack(request, index, time.monotonic_ns(), request), 0)
                answers.append(_run(function, item, max_bytes))
            os.pwrite(note_fd, NOTE.pack(request, len(items), time.monotonic_ns(), request), 0)
            _send(link, request, answers)
    return 0


def frame_of(request: int, entries: Sequence[tuple[Any, ...]]) -> tuple[bytes, list[Buffer]]:
    """(head, buffers) of a frame. The first of each entry is its value: a Fragment or None in place, Parts as buffers."""
    buffers: list[Buffer] = []
    shown = []
    for value, *rest in entries:
        if isinstance(value, list):
            buffers += value
            shown.append([len(value), None, *rest])
        else:
            shown.append([0, value, *rest])
    header = orjson.dumps([request, shown])
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    return PREFIX.pack(len(header), len(buffers)) + struct.pack(f"<{len(sizes)}Q", *sizes) + header, buffers


def entries_of(header: Buffer, buffers: Sequence[memoryview]) -> tuple[int, list[list[Any]]]:
    """What `frame_of` was given, with each entry's value in place. Arrays view their buffers."""
    request, shown = orjson.loads(header)
    entries, at = [], 0
    for num_parts, value, *rest in shown:
        if num_parts:
            from rondo.runtime.transport import unpack  # numpy: only for those who need it

            own = buffers[at : at + num_parts]
            value, at = unpack(own[0], own[1:]), at + num_parts
        entries.append([value, *rest])
    return request, entries


def encoded(value: Any) -> orjson.Fragment | Parts:
    """A value for `frame_of`. TypeError for what is neither JSON, bytes nor a plain array."""
    try:
        return orjson.Fragment(orjson.dumps(value))
    except TypeError:
        from rondo.runtime.transport import pack

        header, buffers = pack(value)
        return [header, *buffers]


def _run(function: Callable[[Any], Any], item: Any, max_bytes: int) -> tuple[Any, ...]:
    try:
        value = encoded(function(item))
        num_bytes = sum(memoryview(part).nbytes for part in value[1:]) if isinstance(value, list) else 0
        if num_bytes > max_bytes:
            raise OutOfSpace(f"what an item returns must have at most {max_bytes} bytes, got {num_bytes}. Return less")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the function raises is this item's error
        return _failed(error)
    return value, None, None


def _failed(error: BaseException, *, with_cause: bool = False) -> tuple[None, str, str]:
    """(no value, text, name of its type). An error of rondo's tree says all in its text, but for where its cause lies; another
    comes with its traceback, from the first frame that is not of the machinery."""
    if not isinstance(error, RondoError):
        text = _traced(error)
    elif with_cause and error.__cause__ is not None:
        text = f"{error}\n{_traced(error.__cause__)}"
    else:
        text = str(error)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    text = text if len(text) <= _MAX_ERROR_CHARACTERS else "..." + text[-_MAX_ERROR_CHARACTERS:]
    return None, text, type(error).__name__


def _traced(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _own_modules and trace.tb_next is not None:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


_own_modules = {__name__, "rondo.runtime.reference", "importlib._bootstrap", "importlib._bootstrap_external"}


def _send(link: socket.socket, request: int, entries: Sequence[tuple[Any, ...]]) -> None:
    head, buffers = frame_of(request, entries)
    link.sendall(head)
    for buffer in buffers:
        link.sendall(buffer)


def _receive(link: socket.socket) -> tuple[int, list[Any]] | None:
    prefix = _read(link, PREFIX.size)
    if prefix is None:
        return None
    num_header, num_buffers = PREFIX.unpack(prefix)
    sizes = _read(link, 8 * num_buffers)
    parts = [_read(link, size) for size in (num_header, *struct.unpack(f"<{num_buffers}Q", sizes or b""))]
    if sizes is None or None in parts:
        return None
    header, *buffers = [memoryview(part) for part in parts if part is not None]
    request, entries = entries_of(header, buffers)
    return request, [value for (value,) in entries]


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
