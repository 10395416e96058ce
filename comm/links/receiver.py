"""The receiving end of links over TCP: one listener a node, which writes all mirrors of that node.

Owns admission (token, attempt, incarnation), the sessions and their credit. Does not own where mirrors lie: `open_mirror`
gives one by ring and capacity, once; the receiver keeps it until `close`.

    receiver = LinkReceiver("node-1", token, lambda ring, capacity: Mirror(segments.segment(...), doorbell, ring))
    await receiver.start("tcp:10.0.0.2:7000")          # loopback unless told otherwise
    receiver.release("ring/rollout-0/0", upto_pos)     # or a RingTail elsewhere, and wake(ring)

Invariants: not one byte behind the hello is read before the token is compared; one session a ring, the newest of the newest
incarnation: an older one is hung up before the new one is told the cursor, so no late byte of it is written.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Any

from rondo.comm.links.config import LinkConfig
from rondo.comm.links.frames import (
    BEAT,
    CHECKSUMS,
    CREDIT,
    DATA,
    LINK_VERSION,
    OPEN,
    OPENED,
    RESEND,
    Frame,
    pack_frame,
    pack_json,
    pack_refusal,
    receive,
    receive_json,
    tcp_target,
)
from rondo.comm.links.mirror import Mirror, MirrorStats
from rondo.comm.links.record_stream import RecordStream
from rondo.runtime.actors.transport import HELLO, HELLO_S, check_hello
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError, Refused, RondoError
from rondo.runtime.waits import waiting

_MAX_HAVE = 1024
"""Most intervals that an OPENED names; what lies beyond is sent again."""


class LinkReceiver:
    """All mirrors of node `node`. `open_mirror(ring, capacity)` may raise errors of rondo's tree: the sender is refused."""

    def __init__(
        self, node: str, token: str, open_mirror: Callable[[str, int], Mirror], config: LinkConfig | None = None
    ) -> None:
        if not token:
            raise ConfigError("links must be guarded by a token, got an empty one. Use the run's.")
        self.node = node
        self.config = config or LinkConfig()
        self.address = ""
        self._token = token
        self._open_mirror = open_mirror
        self._mirrors: dict[str, Mirror] = {}
        self._sessions: dict[str, ReceiverSession] = {}
        self._admissions: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def start(self, address: str = "tcp:127.0.0.1:0") -> None:
        """Listen; `address` then has the port. Raises Refused when it is taken."""
        target, loop = tcp_target(address), asyncio.get_running_loop()
        family, kind, protocol, _, where = (await loop.getaddrinfo(*target, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(where)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise Refused(
                f"{address} must be free to listen on, got {error}. Stop its user, or choose another"
            ) from error
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
        self._accepting(True)

    async def close(self) -> None:
        """Hang up on all senders and let go of the mirrors; their memory keeps what arrived. Safe to call twice."""
        self._accepting(False)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in self._admissions:
            task.cancel()
        await asyncio.gather(*self._admissions, return_exceptions=True)
        for session in list(self._sessions.values()):
            session.close()
        for mirror in self._mirrors.values():
            mirror.close()
        self._mirrors.clear()

    def release(self, ring: str, upto_pos: int) -> None:
        """Let go of everything in a mirror before `upto_pos`, the end of a record."""
        self._mirrors[ring].release(upto_pos)
        self.wake(ring)

    def wake(self, ring: str) -> None:
        """The tail of a mirror was moved by its releaser. (Each beat looks too.)"""
        if ring in self._sessions:
            self._sessions[ring].tell()

    def stats(self) -> tuple[MirrorStats, ...]:
        return tuple(mirror.stats() for _, mirror in sorted(self._mirrors.items()))

    # ---- admission --------------------------------------------------------------------------------------------------

    def _accepting(self, whether: bool) -> None:
        """Whether callers are let in, or wait until they are."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            if whether:
                asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # the caller hung up before it was accepted
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._admit(sock))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)

    async def _admit(self, sock: socket.socket) -> None:
        """One connection, until it belongs to a session or is hung up."""
        admitted = False
        try:
            async with waiting("link hello", peer="a caller", deadline_s=HELLO_S):
                try:
                    check_hello(await receive(sock, HELLO.size), self._token, LINK_VERSION)
                    kind, request = await receive_json(sock)
                    if kind != OPEN:
                        raise ProtocolError(f"a link must begin with OPEN, got kind {kind}. Connect again.")
                    admitted = self._open(sock, request)
                except PeerGone:
                    return
                except RondoError as error:
                    await asyncio.get_running_loop().sock_sendall(sock, pack_refusal(error))
        except (OSError, TimeoutError):
            return  # it left, or said nothing: whoever it is connects again
        finally:
            if not admitted:
                sock.close()

    def _open(self, sock: socket.socket, request: dict[str, Any]) -> bool:
        try:
            ring, index = str(request["ring"]), int(request["stream"])
            if index:
                self._join(sock, ring, index, str(request["session"]))
                return True
            terms = LinkConfig(int(request["num_streams"]), int(request["chunk_bytes"]), str(request["checksum"]))
            capacity, tail = int(request["capacity"]), int(request["tail"])
            attempt, incarnation = int(request["attempt"]), int(request["incarnation"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, RondoError):
                raise
            raise ProtocolError(f"an OPEN must name ring, stream and terms, got {request}.") from error
        if ring not in self._mirrors:
            self._mirrors[ring] = self._open_mirror(ring, capacity)
        mirror = self._mirrors[ring]
        if mirror.capacity != capacity:
            raise ConfigError(f"mirror {ring} must have {capacity} bytes as its origin, got {mirror.capacity}.")
        mirror.admit(attempt, incarnation, tail)
        if ring in self._sessions:
            self._sessions[ring].close()
        self._sessions[ring] = self._session(mirror, terms, sock)
        return True

    def _session(self, mirror: Mirror, terms: LinkConfig, sock: socket.socket) -> ReceiverSession:
        return ReceiverSession(self, mirror, terms, sock)

    def _join(self, sock: socket.socket, ring: str, index: int, name: str) -> None:
        session = self._sessions.get(ring)
        if session is None or not secrets.compare_digest(session.name, name) or index >= session.terms.num_streams:
            raise ProtocolError(f"stream {index} of ring {ring} must join an open session, got another. Connect again.")
        session.join(sock, index)

    def forget(self, session: ReceiverSession) -> None:
        if self._sessions.get(session.mirror.name) is session:
            del self._sessions[session.mirror.name]


class ReceiverSession:
    """The connections of one sender at one time. `terms` are the sender's, which decides streams, chunks and checksum."""

    def __init__(self, receiver: LinkReceiver, mirror: Mirror, terms: LinkConfig, sock: socket.socket) -> None:
        self.name = secrets.token_hex(16)
        self.mirror, self.terms = mirror, terms
        self._receiver = receiver
        self._checksum = CHECKSUMS[terms.checksum]
        self._loop = asyncio.get_running_loop()
        self._told = (mirror.head, mirror.tail)
        self._telling = False
        self._streams: dict[int, RecordStream] = {}
        self._timer = self._loop.call_later(receiver.config.beat_s, self._beat)
        cursor = {"head": mirror.head, "tail": mirror.tail, "seq": mirror.seq, "have": mirror.have()[:_MAX_HAVE]}
        # What lies beyond the intervals named is sent again, so it must not count as arrived.
        mirror.keep(_MAX_HAVE)
        self._streams[0] = RecordStream(sock, 0, self)
        self._streams[0].send(pack_json(OPENED, cursor | {"session": self.name}))

    def join(self, sock: socket.socket, index: int) -> None:
        if index in self._streams:
            raise ProtocolError(f"stream {index} of a session must join once, got it again. Connect again.")
        self._streams[index] = RecordStream(sock, index, self)
        self._streams[index].send(pack_json(OPENED, {}))

    def close(self) -> None:
        self._timer.cancel()
        for stream in self._streams.values():
            stream.close()
        self._receiver.forget(self)

    def tell(self) -> None:
        """The credit, when it changed: once for all that one turn of the loop brings."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        if not self._streams[0].open:
            return
        now = (self.mirror.head, self.mirror.tail)
        if now != self._told:
            self._told = now
            self._streams[0].send(pack_frame(CREDIT, *now))

    def _beat(self) -> None:
        config, now = self._receiver.config, self._loop.time()
        self._timer = self._loop.call_later(config.beat_s, self._beat)
        for stream in list(self._streams.values()):
            if now - stream.heard_s > config.silent_s:
                self.lost(stream, PeerGone(f"a sender must be heard within {config.silent_s:g} s, got silence."))
                return
        self.tell()
        self._streams[0].send(pack_frame(BEAT))

    # ---- as the streams' owner --------------------------------------------------------------------------------------

    def next_chunk(self, stream: RecordStream) -> None:
        return None

    def target(self, stream: RecordStream, frame: Frame) -> memoryview:
        if frame.kind != DATA or frame.body_bytes > self.terms.chunk_bytes:
            raise ProtocolError(
                f"a sender must send chunks of at most {self.terms.chunk_bytes} bytes, got kind {frame.kind} with "
                f"{frame.body_bytes}. Connect again."
            )
        for other in self._streams.values():
            there = other.frame_in_hand
            if there and frame.pos < there.pos + there.body_bytes and there.pos < frame.pos + frame.body_bytes:
                raise ProtocolError(
                    f"a chunk must arrive on one stream at a time, got {frame.pos} twice. Connect again."
                )
        return self.mirror.target(frame.pos, frame.body_bytes)

    def body(self, stream: RecordStream, frame: Frame, memory: memoryview) -> None:
        if self._checksum(memory) == frame.checksum:
            self.arrived(frame.pos, frame.body_bytes)
        else:
            self.refuse(frame.pos, frame.body_bytes)

    def arrived(self, pos: int, num_bytes: int) -> None:
        if self.mirror.arrived(pos, num_bytes):
            self.tell()

    def refuse(self, pos: int, num_bytes: int) -> None:
        """What arrived is not what was sent: it comes again."""
        self.mirror.num_refused_chunks += 1
        self._streams[0].send(pack_frame(RESEND, pos, num_bytes))

    def frame(self, stream: RecordStream, frame: Frame) -> None:
        if frame.kind != BEAT:
            raise ProtocolError(f"a sender must send DATA or BEAT, got kind {frame.kind}. Connect again.")

    def lost(self, stream: RecordStream, error: Exception) -> None:
        self.close()
