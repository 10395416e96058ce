"""The connections of one link at one time: chunks go out of the ring, or come straight into the mirror.

Owns that the connections live and die together, and hear of each other. Does not own which chunk is next, where one belongs or
what a frame means: the two ends do (`sender.py`, `receiver.py`). Bytes of the ring are neither copied nor joined: the loop's
transport reads them and writes them in place.

    bytes -> head, checked -> session.target(stream, frame) -> into this memory -> session.frame(stream, frame, memory)

Invariants: when one connection is lost, so are the others; after `close`, nothing is written to memory and no callback comes; a
connection has at most one chunk in hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rondo.comm.links.config import MAX_CHUNK_BYTES, LinkConfig
from rondo.comm.links.frames import BEAT, DATA, Frame, pack_head, unpack_head
from rondo.runtime.actors.transport import REFUSAL, FrameProtocol, parse_address, unpack
from rondo.runtime.errors import (
    ConfigError,
    CorruptData,
    OutOfSpace,
    PeerGone,
    ProtocolError,
    Refused,
    RemoteError,
    RondoError,
)


class Owner:
    """Whoever hears what comes. Errors of rondo's tree that `frame` raises end in `lost`."""

    def target(self, stream: Stream, frame: Frame) -> memoryview:
        """Where a chunk goes."""
        raise ProtocolError(f"a link's peer must send no chunk here, got {frame.extra} bytes. Connect again.")

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        raise ProtocolError(f"a link's peer must send what belongs here, got kind {frame.kind}. Connect again.")

    def pump(self) -> None:
        """A connection takes more."""

    def lost(self, stream: Stream, error: Exception) -> None:
        """A connection ended, or has to."""


class Stream(FrameProtocol):
    """One connection. `heard_s` is the loop's time of the last bytes; `arriving` the head of the chunk that is on its way in."""

    def __init__(self, owner: Owner) -> None:
        super().__init__("a link's peer", MAX_CHUNK_BYTES)
        self.owner: Owner | None = owner
        self.arriving: Frame | None = None
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()

    def tell(self, frame: Frame, chunk: Sequence[memoryview] = ()) -> None:
        """Send a frame, unless the connection has ended."""
        if self.open:
            self.send(frame.kind, 0, pack_head(frame), chunk)

    def hang_up(self) -> None:
        """Safe to call twice."""
        self.owner, self.open = None, False
        self.transport.abort()
        self._forget_timer()
        self._direct, self._rests, self._whole = None, [], []  # memory of the mirror

    # ---- as a protocol of the loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=0)  # another chunk is asked for when this one has left

    def buffer_updated(self, num_bytes: int) -> None:
        self.heard_s = self._loop.time()
        super().buffer_updated(num_bytes)

    def memory(self, kind: int, header: memoryview, sizes: Sequence[int]) -> list[memoryview]:
        frame = unpack_head(kind, header)
        if kind != DATA or list(sizes) != [frame.extra] or self.owner is None:
            raise ProtocolError(f"a link must carry chunks of {frame.extra} bytes, got kind {kind} and {sizes}.")
        memory = self.owner.target(self, frame)
        self.arriving = frame
        return [memory]

    def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Sequence[memoryview]) -> None:
        self.arriving = None
        if self.owner is None:
            return
        try:
            if kind == REFUSAL:
                raise _refusal(unpack(header, ()))
            self.owner.frame(self, unpack_head(kind, header), buffers[0] if buffers else None)
        except RondoError as error:
            if self.owner is not None:
                self.owner.lost(self, error)

    def resumed(self) -> None:
        if self.owner is not None:
            self.owner.pump()

    def lost(self, error: Exception | None) -> None:
        if self.owner is not None:
            found = error or "the end of its stream"
            self.owner.lost(self, PeerGone(f"a link's peer must stay connected, got {found}. It left, or was cut off"))


class Session(Owner):
    """The connections of one time, all or none. `peer` names whoever must be heard."""

    def __init__(self, streams: list[Stream], config: LinkConfig, peer: str) -> None:
        self.streams = streams
        self._config, self._peer = config, peer
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(config.beat_s, self._beat)
        for stream in streams:
            stream.owner = self

    def close(self) -> None:
        self._timer.cancel()
        for stream in self.streams:
            stream.hang_up()

    def _beat(self) -> None:
        config, now = self._config, self._loop.time()
        self._timer = self._loop.call_later(config.beat_s, self._beat)
        for stream in self.streams:
            if now - stream.heard_s > config.silent_s:
                self.lost(stream, PeerGone(f"{self._peer} must be heard within {config.silent_s:g} s, got silence."))
                return
        for stream in self.streams:
            stream.tell(Frame(BEAT))

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        if frame.kind != BEAT:
            super().frame(stream, frame, memory)

    def lost(self, stream: Stream, error: Exception) -> None:
        self.close()


def check_tcp(address: str) -> str:
    """An address of the form 'tcp:host:port'. Raises ConfigError."""
    if not isinstance(parse_address(address), tuple):
        raise ConfigError(f"the address of a link must look like 'tcp:host:port', got {address!r}. Name another node.")
    return address


def _refusal(told: Any) -> Exception:
    """The error that the other side refused with, of its own type where links raise that."""
    match told:
        case [str(kind), str(text)]:
            known = {each.__name__: each for each in (Refused, ConfigError, CorruptData, OutOfSpace, ProtocolError)}
            return known[kind](text) if kind in known else RemoteError(kind, text)
    return ProtocolError(f"a refusal must have a type and a text, got {told!r}. Connect again.")
