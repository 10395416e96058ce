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
from collections.abc import Callable
from typing import Any

from rondo.comm.links.config import LinkConfig
from rondo.comm.links.frames import CHECKSUMS, CREDIT, DATA, OPEN, OPENED, RESEND, Frame
from rondo.comm.links.mirror import Mirror, MirrorStats
from rondo.comm.links.streams import Owner, Session, Stream, check_tcp
from rondo.runtime.actors.transport import HELLO_S, Listener, listen
from rondo.runtime.errors import ConfigError, ProtocolError, RondoError

_MAX_HAVE = 1024
"""Most intervals that an OPENED names; what lies beyond is sent again."""


class LinkReceiver(Owner):
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
        self._callers: set[Stream] = set()  # that have not opened anything yet
        self._listener: Listener | None = None

    async def start(self, address: str = "tcp:127.0.0.1:0") -> None:
        """Listen; `address` then has the port. Raises Refused when it is taken."""
        self._listener = await listen(check_tcp(address), lambda: _Caller(self, self._token))
        self.address = self._listener.address

    async def close(self) -> None:
        """Hang up on all senders and let go of the mirrors; their memory keeps what arrived. Safe to call twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for stream in self._callers:
            stream.hang_up()
        self._callers.clear()
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

    # ---- admission: as the owner of streams that belong to no session yet -------------------------------------------

    def called(self, stream: Stream) -> None:
        """Somebody connected, and has so long to say what for."""
        self._callers.add(stream)
        asyncio.get_running_loop().call_later(2 * HELLO_S, self._late, stream)

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        if frame.kind != OPEN:
            super().frame(stream, frame, memory)
        self._open(stream, frame.about)
        self._callers.discard(stream)

    def lost(self, stream: Stream, error: Exception) -> None:
        self._callers.discard(stream)
        stream.refuse(error)

    def _late(self, stream: Stream) -> None:
        if stream in self._callers:
            self._callers.discard(stream)
            stream.hang_up()

    def _open(self, stream: Stream, request: dict[str, Any]) -> None:
        try:
            ring, index = str(request["ring"]), int(request["stream"])
            if index:
                self._join(stream, ring, index, str(request["session"]))
                return
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
        self._sessions[ring] = self._session(mirror, terms, stream)

    def _session(self, mirror: Mirror, terms: LinkConfig, stream: Stream) -> ReceiverSession:
        return ReceiverSession(self, mirror, terms, stream)

    def _join(self, stream: Stream, ring: str, index: int, name: str) -> None:
        session = self._sessions.get(ring)
        if session is None or not secrets.compare_digest(session.name, name) or index != len(session.streams):
            raise ProtocolError(
                f"stream {index} of ring {ring} must join an open session once, got another. Connect again."
            )
        if index >= session.terms.num_streams:
            raise ProtocolError(f"a session must have {session.terms.num_streams} streams, got another. Connect again.")
        session.streams.append(stream)
        stream.owner = session
        stream.tell(Frame(OPENED))

    def forget(self, session: ReceiverSession) -> None:
        if self._sessions.get(session.mirror.name) is session:
            del self._sessions[session.mirror.name]


class _Caller(Stream):
    """A connection from its first byte."""

    def __init__(self, receiver: LinkReceiver, token: str) -> None:
        super().__init__(receiver)
        self._receiver, self._token = receiver, token

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.expect_hello(self._token, lambda: None)
        self._receiver.called(self)


class ReceiverSession(Session):
    """The connections of one sender at one time. `terms` are the sender's, which decides streams, chunks and checksum."""

    def __init__(self, receiver: LinkReceiver, mirror: Mirror, terms: LinkConfig, stream: Stream) -> None:
        self.name = secrets.token_hex(16)
        self.mirror, self.terms = mirror, terms
        self._receiver = receiver
        self._checksum = CHECKSUMS[terms.checksum]
        self._told = (mirror.head, mirror.tail)
        self._telling = False
        super().__init__([stream], receiver.config, "a sender")
        cursor = {"head": mirror.head, "tail": mirror.tail, "seq": mirror.seq, "have": mirror.have()[:_MAX_HAVE]}
        # What lies beyond the intervals named is sent again, so it must not count as arrived.
        mirror.keep(_MAX_HAVE)
        stream.tell(Frame(OPENED, about=cursor | {"session": self.name}))

    def close(self) -> None:
        super().close()
        self._receiver.forget(self)

    def tell(self) -> None:
        """The credit, when it changed: once for all that one turn of the loop brings."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        now = (self.mirror.head, self.mirror.tail) if self.streams[0].open else self._told
        if now != self._told:
            self._told = now
            self.streams[0].tell(Frame(CREDIT, *now))

    def _beat(self) -> None:
        self.tell()
        super()._beat()

    def target(self, stream: Stream, frame: Frame) -> memoryview:
        if frame.extra > self.terms.chunk_bytes:
            raise ProtocolError(
                f"a sender must send chunks of at most {self.terms.chunk_bytes} bytes, got {frame.extra}. Connect again."
            )
        for other in self.streams:
            there = other.arriving
            if there and frame.pos < there.pos + there.extra and there.pos < frame.pos + frame.extra:
                raise ProtocolError(
                    f"a chunk must arrive on one stream at a time, got {frame.pos} twice. Connect again."
                )
        return self.mirror.target(frame.pos, frame.extra)

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        if frame.kind != DATA or memory is None:
            super().frame(stream, frame, memory)
        elif self._checksum(memory) == frame.checksum:
            self.arrived(frame.pos, frame.extra)
        else:
            self.refuse(frame.pos, frame.extra)

    def arrived(self, pos: int, num_bytes: int) -> None:
        if self.mirror.arrived(pos, num_bytes):
            self.tell()

    def refuse(self, pos: int, num_bytes: int) -> None:
        """What arrived is not what was sent: it comes again."""
        self.mirror.num_refused_chunks += 1
        self.streams[0].tell(Frame(RESEND, pos, num_bytes))
