"""The process that runs a function for a `Pool`, so that whatever the function does, only this process suffers.

Owns the loop of one worker: read a frame, run its items one by one, write a frame. Does not own deadlines or restarts
(`pool.py`, its parent). Imports the standard library and orjson; numpy once an array comes along, and what the function brings.

    parent -> [request, [item, ...]]                                   an item is a value
    worker -> [request, [[value, error | null, kind | null, brief | null], ...]]     first of all one of nulls, or its error

A frame is a length, an orjson header and raw buffers: each value's text stands in the header, and its arrays and bytes in
buffers (`values.py`). Nothing is pickled.

Before each item, and behind the last, the worker notes (request, item, start time) where its parent can read it when it must
kill: `os.pwrite` into a memfd, 0.6 us. Frames have a socket of their own: what the function prints goes to standard error, its
standard input is empty. The process dies with its parent, also while the function hangs, and takes what the function started with
it (`subreaper.py`).
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
from rondo.runtime.processes.subreaper import keep
from rondo.runtime.reference import in_one_line, in_users_words, is_ours, load_reference, uncollected
from rondo.runtime.values import Buffer, Encoded, decode, encode

PREFIX = struct.Struct("<QI")
"""Bytes of the header, number of buffers; the buffers' sizes follow, 8 bytes each, then the header, then the buffers."""
NOTE = struct.Struct("<QqqQ")
"""Request, item, start in nanoseconds of the monotonic clock, request again: unequal ends were read while written."""

_MAX_ERROR_CHARACTERS = 4000
_NOTHING = Encoded(b"null", [])


def main(arguments: list[str]) -> int:
    """`pool_worker SOCKET_FD NOTE_FD PARENT_PID MAX_BYTES OPEN SETTINGS`: serves until the parent closes the socket.

    OPEN names a function; what it returns for the JSON object SETTINGS (as keywords) is the function that items are given to.
    MAX_BYTES bounds the arrays and bytes that it may return for one.
    """
    socket_fd, note_fd, parent, max_bytes = map(int, arguments[:4])
    keep(parent, (socket_fd, note_fd))
    os.dup2(2, 1)
    for fd in (socket_fd, note_fd):
        os.set_inheritable(fd, False)
    with socket.socket(fileno=socket_fd) as link:
        worker = os.getpid()
        try:
            with uncollected():
                open_function = load_reference(arguments[4], "the function of a pool")
                function = open_function(**orjson.loads(arguments[5]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what it loads may raise anything; the parent reports it
            end_if_forked(worker)
            traceback.print_exception(error)  # for the log
            _send(link, 0, [failed(error)])
            return 1
        end_if_forked(worker)
        gc.freeze()  # what was loaded stays: it is walked neither between items nor at the end of the process
        _send(link, 0, [(None, None, None, None)])
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
    """(head, buffers) of a frame. The first of each entry is its value, or None."""
    buffers: list[Buffer] = []
    shown = []
    for value, *rest in entries:
        text, own = _NOTHING if value is None else value
        buffers += own
        shown.append([len(own), orjson.Fragment(text), *rest])
    header = orjson.dumps([request, shown])
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    return PREFIX.pack(len(header), len(buffers)) + struct.pack(f"<{len(sizes)}Q", *sizes) + header, buffers


def entries_of(header: Buffer, buffers: Sequence[memoryview]) -> tuple[int, list[list[Any]]]:
    """What `frame_of` was given, with each entry's value in place. Arrays view their buffers."""
    request, shown = orjson.loads(header)
    entries, at = [], 0
    for num_own, value, *rest in shown:
        entries.append([decode(value, buffers[at : at + num_own]), *rest])
        at += num_own
    return request, entries


def end_if_forked(worker: int) -> None:
    """End this process if it is not `worker`: a child that the user's function has forked, and that has returned into our code,
    would go on answering in the worker's place."""
    if os.getpid() != worker:
        os._exit(1)


def _run(function: Callable[[Any], Any], item: Any, max_bytes: int) -> tuple[Any, ...]:
    worker = os.getpid()
    try:
        result = function(item)
        value = result if isinstance(result, Encoded) else encode(result)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in value.buffers)
        if num_bytes > max_bytes:
            raise OutOfSpace(f"what an item returns must have at most {max_bytes} bytes, got {num_bytes}. Return less")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the function raises is this item's error
        return failed(error)
    finally:
        end_if_forked(worker)
    return value, None, None, None


def failed(error: BaseException) -> tuple[None, str, str, str]:
    """(no value, text, name of its type, one line). An error of rondo's tree says all in its text; another comes with its
    traceback, from the first frame that is not of the machinery."""
    if isinstance(error, RondoError):
        text = brief = str(error)
    else:
        trace = error.__traceback__
        while trace is not None and is_ours(trace.tb_frame) and trace.tb_next is not None:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        brief = in_one_line(error)
    cut = text if len(text) <= _MAX_ERROR_CHARACTERS else "..." + text[-_MAX_ERROR_CHARACTERS:]
    return None, _told(cut), type(error).__name__, _told(brief[:_MAX_ERROR_CHARACTERS])


def _told(text: str) -> str:
    return in_users_words(text.encode("utf-8", "backslashreplace").decode("utf-8"))


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
    """Exactly so many bytes, or None when the parent has closed its end, or is gone."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        try:
            received = link.recv_into(view)
        except ConnectionResetError:  # it ended with an answer of ours unread
            return None
        if received == 0:
            return None
        view = view[received:]
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
