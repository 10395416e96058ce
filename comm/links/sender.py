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
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from rondo.comm.links.config import LinkConfig, LinkStats
from rondo.comm.links.frames import CHECKSUMS, CREDIT, DATA, OPEN, OPENED, RESEND, Frame
from rondo.comm.links.origin import Origin, Piece
from rondo.comm.links.streams import Owner, Session, Stream, check_tcp
from rondo.runtime.actors.transport import connect
from rondo.runtime.errors import ConfigError, CorruptData, DeadlineExceeded, PeerGone, ProtocolError
from rondo.runtime.memory.segments import Segment
from rondo.runtime.waits import PROCESS, Wait, waiting

_MAX_RESENDS = 8
"""A piece refused more often than this is not damaged on the way."""
_RETRIED = (PeerGone, ProtocolError, DeadlineExceeded, OSError)


class LinkSender:
    """One ring to one node. `progress(mirrored, released)`, in log offsets, is called on the loop whenever either moved.

    `incarnation` fences: a receiver refuses a sender older than the newest it saw. `apart`: payloads cross another way.
    """

    def __init__(
        self, segment: Segment, ring: str, address: str, *, token: str, node: str, attempt: int, incarnation: int = 0,
        config: LinkConfig | None = None, apart: bool = False, progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        if not token:
            raise ConfigError("a link must show a token, got an empty one. Read it from the run-time directory.")
        self.ring, self.node, self.config = ring, node, config or LinkConfig()
        self.mirrored = self.released = 0
        self.counts: Counter[str] = Counter()
        self._origin = Origin(segment, ring, apart=apart)
        self._address = address and check_tcp(address)  # none: an epoch's is told later (`collective.py`)
        self._token = token
        self._identity = {
            "ring": ring,
            "capacity": self._origin.capacity,
            "attempt": attempt,
            "incarnation": incarnation,
        }
        self._progress = progress
        self._session: SenderSession | None = None
        self._moved = asyncio.Event()
        self._state = "is not started"
        self._stalled: Wait | None = None
        self._last_loss = ""

    async def run(self) -> None:
        """Mirror until cancelled. Raises Refused or CorruptData at what no retry mends, PeerGone when `reconnect_s` passed."""
        loop = asyncio.get_running_loop()
        since, pause_s = loop.time(), self.config.first_pause_s
        try:
            while True:
                self._state = f"connects to {self.node}"
                before = self.counts["num_bytes"]
                try:
                    await self._serve(SenderSession(self, self._origin, await self._connect()))
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

    def wake(self) -> None:
        """Records became visible in the ring. To be called on the loop."""
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
        state = f"waits for room at {self.node}" if self.is_stalled else self._state
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

    @property
    def is_stalled(self) -> bool:
        return self._stalled is not None

    def stalled(self, waits: bool) -> None:
        """List or end the wait for room."""
        if waits and self._stalled is None:
            self.counts["num_stalls"] += 1
            self._stalled = PROCESS.begin("link room", self.node, None)
        elif not waits and self._stalled is not None:
            PROCESS.end(self._stalled)
            self._stalled = None

    # ---- connecting -------------------------------------------------------------------------------------------------

    async def _connect(self, **terms: Any) -> list[Stream]:
        """The streams of one time. What is sent over them goes on at what the receiver has."""
        config, streams = self.config, list[Stream]()
        request = {**self._identity, **terms, "tail": self._origin.tail}
        request |= {"checksum": config.checksum, "chunk_bytes": config.chunk_bytes, "num_streams": config.num_streams}
        try:
            async with waiting("link connect", peer=self.node, deadline_s=config.connect_s):
                for index in range(config.num_streams):
                    answer = _Answer()
                    streams.append(await connect(self._address, functools.partial(Stream, answer)))
                    streams[-1].say_hello(self._token, f"link {self.ring}")
                    streams[-1].tell(Frame(OPEN, about={**request, "stream": index}))
                    told = await answer.told
                    if index == 0:
                        opened, request = told, {"ring": self.ring, "session": told["session"]}
                have = [(int(start), int(end)) for start, end in opened["have"]]
                self._origin.start(int(opened["head"]), int(opened["seq"]), have)
        except BaseException:
            for stream in streams:
                stream.hang_up()
            raise
        self.counts["num_sessions"] += 1
        self.moved(int(opened["head"]), int(opened["tail"]))
        return streams

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


class _Answer(Owner):
    """What the other side says first."""

    def __init__(self) -> None:
        self.told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        if frame.kind != OPENED or self.told.done():
            super().frame(stream, frame, memory)
        self.told.set_result(frame.about)

    def lost(self, stream: Stream, error: Exception) -> None:
        if not self.told.done():
            self.told.set_exception(error)


class SenderSession(Session):
    """Sends pieces of the ring, over whichever connection takes one."""

    def __init__(self, link: LinkSender, origin: Origin, streams: list[Stream]) -> None:
        self._link = link
        self._origin = origin
        self._checksum = CHECKSUMS[link.config.checksum]
        self._refused: Counter[int] = Counter()
        self._goes_on = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(streams, link.config, link.node)
        for stream in streams:
            if not stream.open:  # lost since it was opened
                stream.lost(None)

    def pump(self) -> None:
        """A piece for every connection that takes one; then the loop has its turn before the next ones."""
        ready = [stream for stream in self.streams if stream.open and not stream.paused]
        if ready and not self._goes_on and all(self._send_next(stream) for stream in ready):
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _beat(self) -> None:
        super()._beat()
        self.pump()  # records that nobody told of

    def _go_on(self) -> None:
        self._goes_on = False
        self.pump()

    def _send_next(self, stream: Stream) -> bool:
        """Whether there may be more to send."""
        link, origin = self._link, self._origin
        credit = link.released + origin.capacity
        try:
            piece = origin.take(link.config.chunk_bytes, credit)
            if piece is None:
                link.stalled(origin.waits_for_room(credit))
                return False
            data = origin.view(piece.pos, piece.num_bytes)
        except CorruptData as error:
            self.lost(stream, error)
            return False
        link.counts["num_chunks"] += 1
        link.counts["num_bytes"] += piece.num_bytes
        return self.send_piece(stream, piece, data)

    def send_piece(self, stream: Stream, piece: Piece, data: memoryview) -> bool:
        """Whether another piece may follow at once."""
        stream.tell(Frame(DATA, piece.pos, piece.num_bytes, self._checksum(data)), [data])
        return True

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        link = self._link
        if frame.kind == CREDIT:
            if not link.mirrored <= frame.pos <= self._origin.head or not link.released <= frame.extra <= frame.pos:
                raise ProtocolError(f"a credit must grow and stay below the head, got {frame.pos} and {frame.extra}.")
            link.moved(frame.pos, frame.extra)
            if link.is_stalled:
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
        else:
            super().frame(stream, frame, memory)

    def lost(self, stream: Stream, error: Exception) -> None:
        self.close()
        if not self.ended.done():
            self.ended.set_exception(error)
