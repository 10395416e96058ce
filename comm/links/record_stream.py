"""One connection of a link: chunks go out of the ring, or come straight into the mirror, on a socket that never blocks.

Owns where in a frame each direction stands. Does not own which chunk is next, where it belongs or what a frame means: its
owner is asked and told. Bytes of the ring are neither copied nor joined: `sendmsg` reads them and `recv_into` writes them in
place. Works on any asyncio loop.

    readable -> header, checked -> owner.target(stream, frame) -> recv_into(...) -> owner.body(stream, frame, memory)
                               \\-> owner.frame(stream, frame)   for frames without a body
    writable -> what was told to `send`, else owner.next_chunk(stream) -> sendmsg([header, chunk])

Invariant: after `close`, nothing is written to memory and no callback comes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from rondo.comm.links.frames import FRAME_BYTES, Frame, unpack_frame
from rondo.runtime.errors import PeerGone, RondoError

_READS_AT_ONCE = 4
"""Calls of one stream before the loop's other streams get their turn."""


class Owner(Protocol):
    """A session, as its streams see it. Errors of rondo's tree that these raise end in `lost`."""

    def next_chunk(self, stream: RecordStream) -> list[bytes | memoryview] | None: ...
    def target(self, stream: RecordStream, frame: Frame) -> memoryview: ...
    def body(self, stream: RecordStream, frame: Frame, memory: memoryview) -> None: ...
    def frame(self, stream: RecordStream, frame: Frame) -> None: ...
    def lost(self, stream: RecordStream, error: Exception) -> None: ...


class RecordStream:
    """`heard_s` and `told_s` are the loop's times of the last byte in and out; `busy` says that bytes wait to leave."""

    def __init__(self, sock: socket.socket, index: int, owner: Owner) -> None:
        self.index = index
        self.open = True
        self.busy = False
        self._sock = sock
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.heard_s = self.told_s = self._loop.time()
        self._header = memoryview(bytearray(FRAME_BYTES))
        self._frame: Frame | None = None  # of the body that is arriving
        self._into = self._rest = self._header
        self._out: list[memoryview] = []
        self._queued: list[bytes] = []
        self._loop.add_reader(sock, self._readable)

    @property
    def frame_in_hand(self) -> Frame | None:
        """The frame whose body is arriving."""
        return self._frame

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._out.clear()
            del self._into, self._rest, self._owner

    def send(self, frame: bytes) -> None:
        """Queue a small frame; it leaves behind the chunk in hand."""
        if self.open:
            self._queued.append(frame)
            self.pump()

    def pump(self) -> None:
        """There may be something to send."""
        if self.open and not self.busy:
            self.busy = True
            self._loop.add_writer(self._sock, self._writable)
            self._writable()

    # ---- out --------------------------------------------------------------------------------------------------------

    def _writable(self) -> None:
        out = self._out
        try:
            if not out:
                if self._queued:
                    out.append(memoryview(b"".join(self._queued)))
                    self._queued.clear()
                else:
                    chunk = self._owner.next_chunk(self)
                    if chunk is None:
                        self.busy = False
                        self._loop.remove_writer(self._sock)
                        return
                    out += [memoryview(part) for part in chunk]
            sent = self._sock.sendmsg(out)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._owner.lost(self, error if isinstance(error, RondoError) else _gone(error))
            return
        except RondoError as error:
            self._owner.lost(self, error)
            return
        self.told_s = self._loop.time()
        while out and sent >= len(out[0]):
            sent -= len(out.pop(0))
        if out:
            out[0] = out[0][sent:]

    # ---- in ---------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            for _ in range(_READS_AT_ONCE):
                got = self._sock.recv_into(self._rest)
                if got == 0:
                    raise PeerGone(
                        "a link's peer must stay connected, got the end of its stream. It left, or was cut off"
                    )
                self.heard_s = self._loop.time()
                self._rest = self._rest[got:]
                if not self._rest:
                    self._whole()
                    if not self.open:
                        return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._owner.lost(self, error if isinstance(error, RondoError) else _gone(error))
        except RondoError as error:
            self._owner.lost(self, error)

    def _whole(self) -> None:
        """A header or a body is complete."""
        if self._frame is None:
            frame = unpack_frame(self._header)
            if frame.body_bytes:
                self._into = self._rest = self._owner.target(self, frame)
                self._frame = frame
                return
            self._rest = self._header
            self._owner.frame(self, frame)
            return
        frame, memory = self._frame, self._into
        self._frame, self._into, self._rest = None, self._header, self._header
        self._owner.body(self, frame, memory)


def _gone(error: OSError) -> PeerGone:
    return PeerGone(f"a link's peer must stay connected, got {error}. It left, or was cut off")
