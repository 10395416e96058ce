"""The sending end of a link: keeps one mirror on another node equal to one ring of this node.

Owns the connections, and what of the ring was reported as arrived. Does not own the ring: it never releases it. The coordinator
holds the ring's tail at `released` (or at `mirrored`, if the other node need not hold back).

    sender = LinkSender(segment, "ring/rollout-0/0", "tcp:10.0.0.2:7000", token=token, node="node-1", attempt=0)
    task = group.create_task(sender.run())       # reconnects; ends with an error when it cannot go on
    sender.wake()                                # records became visible
    await sender.mirrored_upto(ref.pos + ref.num_bytes, deadline_s=60.0)

Invariants: nothing is sent beyond the credit; after a loss everything goes on at what the receiver says it has; an error of
the network is retried until `reconnect_s` without progress, a refusal ends the link at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from rondo.comm.links.config import LinkConfig, LinkStats
from rondo.comm.links.frames import (
    BEAT,
    CHECKSUMS,
    CREDIT,
    DATA,
    LINK_VERSION,
    MAX_BODY_BYTES,
    OPEN,
    OPENED,
    REFUSAL,
    RESEND,
    Frame,
    pack_frame,
    pack_json,
    receive_json,
    refusal,
    tcp_target,
    unpack_json,
)
from rondo.comm.links.origin import Origin, Piece
from rondo.comm.links.record_stream import RecordStream
from rondo.comm.ring.ring import Memory
from rondo.comm.ring.words import drain
from rondo.runtime.actors.transport import pack_hello
from rondo.runtime.errors import ConfigError, CorruptData, DeadlineExceeded, PeerGone, ProtocolError
from rondo.runtime.waits import PROCESS, Wait, waiting

_MAX_RESENDS = 8
"""A piece refused more often than this is not damaged on the way."""
_RETRIED = (PeerGone, ProtocolError, DeadlineExceeded, OSError)


class Sending:
    """One ring to one node, over the connections of one time after another. `mirrored` and `released` are log offsets."""

    def __init__(
        self, segment: Memory, ring: str, *, token: str, node: str, attempt: int, incarnation: int,
        config: LinkConfig, apart: bool = False, doorbell_fd: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        if not token:
            raise ConfigError("a link must show a token, got an empty one. Read it from the run-time directory.")
        self.ring, self.node, self.config = ring, node, config
        self.mirrored = self.released = 0
        self.counts: Counter[str] = Counter()
        self._origin = Origin(segment, ring, apart=apart)
        self._token = token
        self._identity = {
            "ring": ring,
            "capacity": self._origin.capacity,
            "attempt": attempt,
            "incarnation": incarnation,
        }
        self._doorbell_fd = doorbell_fd
        self._progress = progress
        self._session: SenderSession | None = None
        self._moved = asyncio.Event()
        self._state = "is not started"
        self._stalled: Wait | None = None
        self._last_loss = ""

    def wake(self) -> None:
        """Records became visible in the ring. To be called on the loop."""
        if self._doorbell_fd is not None:
            drain(self._doorbell_fd)
        self._origin.look()
        if self._session is not None:
            self._session.pump()

    async def mirrored_upto(self, pos: int, *, deadline_s: float) -> None:
        """Wait until the mirror shows everything before log offset `pos`. Raises DeadlineExceeded."""
        await self._upto("link mirrored", lambda: self.mirrored >= pos, deadline_s)

    async def released_upto(self, pos: int, *, deadline_s: float) -> None:
        """Wait until the other node let go of everything before log offset `pos`. Raises DeadlineExceeded."""
        await self._upto("link released", lambda: self.released >= pos, deadline_s)

    async def _upto(self, name: str, reached: Callable[[], bool], deadline_s: float) -> None:
        async with waiting(name, peer=self.node, deadline_s=deadline_s):
            while not reached():
                self._moved.clear()
                await self._moved.wait()

    def close(self) -> None:
        """Let go of the ring, after `run` has ended."""
        self._origin.close()

    def stats(self) -> LinkStats:
        state = f"waits for room at {self.node}" if self._stalled is not None else self._state
        counts = self.counts
        return LinkStats(
            self.ring, self.node, state, self.mirrored, self.released, counts["num_bytes"], self._origin.num_records,
            counts["num_chunks"], counts["num_resent"], max(0, counts["num_sessions"] - 1), counts["num_stalls"],
            self._last_loss,
        )  # fmt: skip

    # ---- for sessions -----------------------------------------------------------------------------------------------

    def moved(self, mirrored: int, released: int) -> None:
        if (mirrored, released) != (self.mirrored, self.released):
            self.mirrored, self.released = mirrored, released
            self._moved.set()
            if self._progress is not None:
                self._progress(mirrored, released)

    def stalled(self, waits: bool) -> None:
        """List or end the wait for room."""
        if waits and self._stalled is None:
            self.counts["num_stalls"] += 1
            self._stalled = PROCESS.begin("link room", self.node, None)
        elif not waits and self._stalled is not None:
            PROCESS.end(self._stalled)
            self._stalled = None

    # ---- connecting -------------------------------------------------------------------------------------------------

    async def _connect(self, target: tuple[str, int], **terms: Any) -> list[socket.socket]:
        """The streams of one time. What is sent over them goes on at what the receiver has."""
        config = self.config
        async with waiting("link connect", peer=self.node, deadline_s=config.connect_s):
            with contextlib.ExitStack() as undo:
                first = {**self._identity, **terms, "stream": 0, "tail": self._origin.tail}
                sock, opened = await self._open_stream(undo, target, first)
                sockets, more = [sock], {"ring": self.ring, "session": opened["session"]}
                for index in range(1, config.num_streams):
                    sockets.append((await self._open_stream(undo, target, {**more, "stream": index}))[0])
                have = [(int(start), int(end)) for start, end in opened["have"]]
                self._origin.start(int(opened["head"]), int(opened["seq"]), have)
                self.counts["num_sessions"] += 1
                self.moved(int(opened["head"]), int(opened["tail"]))
                undo.pop_all()
                return sockets

    async def _open_stream(
        self, undo: contextlib.ExitStack, target: tuple[str, int], request: dict[str, Any]
    ) -> tuple[socket.socket, dict[str, Any]]:
        loop, config = asyncio.get_running_loop(), self.config
        request |= {"checksum": config.checksum, "chunk_bytes": config.chunk_bytes, "num_streams": config.num_streams}
        family, kind, protocol, _, where = (await loop.getaddrinfo(*target, type=socket.SOCK_STREAM))[0]
        sock = socket.socket(family, kind, protocol)
        undo.callback(sock.close)
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = pack_hello(self._token, f"link {self.ring}", LINK_VERSION)
        await loop.sock_sendall(sock, hello + pack_json(OPEN, request))
        kind_told, answer = await receive_json(sock)
        if kind_told == REFUSAL:
            raise refusal(answer)
        if kind_told != OPENED:
            raise ProtocolError(f"a link's receiver must answer with OPENED or REFUSAL, got kind {kind_told}.")
        return sock, answer

    async def _serve(self, session: SenderSession) -> None:
        self._session = session
        self._state = "sends"
        try:
            session.pump()
            await session.ended
        finally:
            self._session = None
            self.stalled(False)
            session.close()


class LinkSender(Sending):
    """One ring to one node, over TCP. `progress(mirrored, released)` is called on the loop whenever either moved.

    `incarnation` fences: a receiver refuses a sender older than the newest it saw. `doorbell_fd` is this link's own (the
    ring's belongs to the coordinator); without one, `wake` says that there are records.
    """

    def __init__(
        self,
        segment: Memory,
        ring: str,
        address: str,
        *,
        token: str,
        node: str,
        attempt: int,
        incarnation: int = 0,
        config: LinkConfig | None = None,
        doorbell_fd: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._target = tcp_target(address)
        super().__init__(
            segment, ring, token=token, node=node, attempt=attempt, incarnation=incarnation, config=config or LinkConfig(),
            doorbell_fd=doorbell_fd, progress=progress,
        )  # fmt: skip

    async def run(self) -> None:
        """Mirror until cancelled. Raises Refused or CorruptData at what no retry mends, PeerGone when `reconnect_s` passed."""
        loop = asyncio.get_running_loop()
        if self._doorbell_fd is not None:
            loop.add_reader(self._doorbell_fd, self.wake)
        since, pause_s = loop.time(), self.config.first_pause_s
        try:
            while True:
                self._state = f"connects to {self.node}"
                before = self.counts["num_bytes"]
                try:
                    await self._serve(SenderSession(self, self._origin, await self._connect(self._target)))
                except _RETRIED as error:
                    self._last_loss = str(error)
                    if self.counts["num_bytes"] > before:
                        since, pause_s = loop.time(), self.config.first_pause_s
                    if loop.time() + pause_s - since > self.config.reconnect_s:
                        raise PeerGone(
                            f"the link of ring {self.ring} to {self.node} must be made again within "
                            f"{self.config.reconnect_s:g} s, got {error}. Look at the network, or raise reconnect_s"
                        ) from error
                self._state = f"pauses before it connects to {self.node}"
                async with waiting("link pause", peer=self.node, deadline_s=None):
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self.config.longest_pause_s)
        finally:
            self._state = "ended"
            if self._doorbell_fd is not None:
                loop.remove_reader(self._doorbell_fd)


class SenderSession:
    """The connections of one time, all or none: when one is lost, so are the others."""

    def __init__(self, link: Sending, origin: Origin, sockets: list[socket.socket]) -> None:
        self._link = link
        self._origin = origin
        self._loop = asyncio.get_running_loop()
        self._checksum = CHECKSUMS[link.config.checksum]
        self._refused: Counter[int] = Counter()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._streams = [RecordStream(sock, i, self) for i, sock in enumerate(sockets)]
        self._timer = self._loop.call_later(link.config.beat_s, self._beat)

    def close(self) -> None:
        self._timer.cancel()
        for stream in self._streams:
            stream.close()

    def pump(self) -> None:
        for stream in self._streams:
            stream.pump()

    def _beat(self) -> None:
        config, now = self._link.config, self._loop.time()
        self._timer = self._loop.call_later(config.beat_s, self._beat)
        for stream in self._streams:
            silent = now - (stream.told_s if stream.index else stream.heard_s)
            if (stream.busy or not stream.index) and silent > config.silent_s:
                self.lost(
                    stream, PeerGone(f"{self._link.node} must be heard within {config.silent_s:g} s, got silence.")
                )
                return
        for stream in self._streams:
            if not stream.busy:
                stream.send(pack_frame(BEAT))

    def frames_of(self, piece: Piece, data: memoryview) -> list[bytes | memoryview]:
        """What crosses a stream for a piece of the ring."""
        return [pack_frame(DATA, piece.pos, checksum=self._checksum(data), body_bytes=piece.num_bytes), data]

    # ---- as the streams' owner --------------------------------------------------------------------------------------

    def next_chunk(self, stream: RecordStream) -> list[bytes | memoryview] | None:
        link, origin = self._link, self._origin
        credit = link.released + origin.capacity
        piece = origin.take(link.config.chunk_bytes, credit)
        if piece is None:
            link.stalled(origin.waits_for_room(credit))
            return None
        data = origin.view(piece.pos, piece.num_bytes)
        link.counts["num_chunks"] += 1
        link.counts["num_bytes"] += piece.num_bytes
        return self.frames_of(piece, data)

    def target(self, stream: RecordStream, frame: Frame) -> memoryview:
        if frame.kind != REFUSAL or frame.body_bytes > MAX_BODY_BYTES:
            raise ProtocolError(f"a link's receiver must send no chunks, got kind {frame.kind}.")
        return memoryview(bytearray(frame.body_bytes))

    def body(self, stream: RecordStream, frame: Frame, memory: memoryview) -> None:
        self.lost(stream, refusal(unpack_json(frame, bytes(memory))))

    def frame(self, stream: RecordStream, frame: Frame) -> None:
        link = self._link
        if frame.kind == CREDIT:
            if not link.mirrored <= frame.pos <= self._origin.head or not link.released <= frame.extra <= frame.pos:
                raise ProtocolError(f"a credit must grow and stay below the head, got {frame.pos} and {frame.extra}.")
            link.moved(frame.pos, frame.extra)
            if link._stalled is not None:
                link.stalled(False)
                self.pump()
        elif frame.kind == RESEND:
            self._refused[frame.pos] += 1
            if self._refused[frame.pos] > _MAX_RESENDS:
                raise CorruptData(
                    f"the chunk at {frame.pos} of ring {link.ring} must arrive as it was sent, got {_MAX_RESENDS} refusals. "
                    "Something writes to the ring, or the network cannot be used."
                )
            link.counts["num_resent"] += 1
            self._origin.again(frame.pos, frame.extra)
            self.pump()
        elif frame.kind != BEAT:
            raise ProtocolError(f"a link's receiver must send CREDIT, RESEND or BEAT, got kind {frame.kind}.")

    def lost(self, stream: RecordStream, error: Exception) -> None:
        self.close()
        if not self.ended.done():
            self.ended.set_exception(error)
