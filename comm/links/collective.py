"""A link whose payloads cross a process group (gloo, nccl); headers, descriptors and control cross one TCP stream beside it.

Owns how one epoch of such a link begins and ends, and how payloads cross. Does not own the streams and what is told on them
(`sender.py`, `receiver.py`), the group (`comm/groups/groups.py`), the rings, or what follows an epoch.

    sender                          one stream, TCP                                receiver
                OPEN {ring, epoch, ...}  ->           <-  OPENED {head, tail, have}
    record      DATA header + descriptor ->                                        into the mirror
                PAYLOAD pos, num_bytes   ->
    payload     ============ communicator.send / recv ============                 staging, checked, then into the mirror
                                                      <-  CREDIT, RESEND, BEAT

    while True:                                             # the same lines at both ends, with `receiver.run` there
        communicator = await groups.join(spec)
        try:
            await sender.run(address, communicator, peer=1)
        except GroupBroken:
            continue                                        # the next epoch goes on behind the last piece that arrived

Invariants: an epoch has one stream, and with either the other is over; the mirror alone says where to go on. A broken call may
still read or write its tensor, so payloads pass through tensors of the epoch's own, never straight from the ring or into the
mirror. Over nccl a checksum other than "none" costs a copy to the host. Not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rondo.comm.groups.communicators import Communicator
from rondo.comm.links.config import LinkConfig
from rondo.comm.links.device_ring import DeviceMirror
from rondo.comm.links.frames import OPEN, PAYLOAD, Frame
from rondo.comm.links.mirror import Mirror
from rondo.comm.links.origin import Origin, Piece
from rondo.comm.links.receiver import LinkReceiver, ReceiverSession
from rondo.comm.links.sender import LinkSender, SenderSession
from rondo.comm.links.streams import Stream, check_tcp
from rondo.runtime.errors import DeadlineExceeded, GroupBroken, PeerGone, ProtocolError, Refused, RondoError
from rondo.runtime.memory.segments import Segment
from rondo.runtime.waits import waiting


class _Way(NamedTuple):
    """Which way payloads cross in one epoch: to or from rank `peer`, on the group's `device`."""

    communicator: Communicator
    peer: int
    device: str

    @property
    def epoch(self) -> str:
        """The group and its epoch, as both ends must name it."""
        return f"{self.communicator.spec.name}/{self.communicator.epoch.number}"


@contextlib.asynccontextmanager
async def _one_epoch(communicator: Communicator) -> AsyncIterator[None]:
    """However it ends, the communicator's epoch is over."""
    why = "the link ended here"
    try:
        yield
    except GroupBroken:
        raise
    except (PeerGone, ProtocolError, DeadlineExceeded, OSError) as error:
        why = str(error)
        raise GroupBroken(communicator.spec.name, communicator.epoch.number, "mirror", why) from error
    finally:
        communicator.abort(why)


# ---- the sending end ------------------------------------------------------------------------------------------------


class CollectiveSender(LinkSender):
    """One ring to one mirror. The coordinator holds the ring's tail at `released`, or at `mirrored` where the mirror lies in host
    memory."""

    def __init__(
        self, segment: Segment, ring: str, *, token: str, attempt: int, incarnation: int = 0,
        config: LinkConfig | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            segment, ring, "", token=token, node="the other end", attempt=attempt, incarnation=incarnation,
            config=replace(config or LinkConfig(), num_streams=1), apart=True,
        )  # fmt: skip

    async def run(  # type: ignore[override]  # one epoch, at the address of its mirror
        self, address: str, communicator: Communicator, peer: int, *, device: str = "cpu"
    ) -> None:
        """Mirror to rank `peer` until the epoch is over: GroupBroken. `device` is the group's. Refused, CorruptData: no use."""
        way, self._address = _Way(communicator, peer, device), check_tcp(address)
        async with _one_epoch(communicator):
            streams = await self._connect(epoch=way.epoch)
            await self._serve(_PayloadSender(self, self._origin, streams, way))


class _PayloadSender(SenderSession):
    """Sends one payload at a time, through a tensor of its own."""

    def __init__(self, link: LinkSender, origin: Origin, streams: list[Stream], way: _Way) -> None:
        self._way = way
        self._host = torch.empty(link.config.chunk_bytes, dtype=torch.uint8)
        self._there = self._host if way.device == "cpu" else torch.empty_like(self._host, device=way.device)
        self._crossing: asyncio.Task[None] | None = None
        super().__init__(link, origin, streams)

    def close(self) -> None:
        super().close()
        if self._crossing is not None:
            self._crossing.cancel()

    def pump(self) -> None:
        if self._crossing is None:
            super().pump()

    def send_piece(self, stream: Stream, piece: Piece, data: memoryview) -> bool:
        if not piece.is_payload:
            return super().send_piece(stream, piece, data)
        host = self._host.numpy()[: piece.num_bytes]
        host[:] = np.frombuffer(data, np.uint8)
        self._crossing = self._loop.create_task(self._cross(stream, piece.num_bytes))
        stream.tell(Frame(PAYLOAD, piece.pos, piece.num_bytes, self._checksum(host.data)))
        return False

    async def _cross(self, stream: Stream, num_bytes: int) -> None:
        moved = self._there[:num_bytes]
        if moved.device.type != "cpu":
            moved.copy_(self._host[:num_bytes])
        try:
            await asyncio.to_thread(self._way.communicator.send, moved, self._way.peer)
        except Exception as error:  # noqa: BLE001  # whatever it is, it ends the epoch, and is raised by `run`
            self.lost(stream, error)
        else:
            self._crossing = None
            self.pump()


# ---- the receiving end ----------------------------------------------------------------------------------------------


class CollectiveReceiver(LinkReceiver):
    """One mirror, fed by one sender an epoch. The caller keeps and closes the mirror. Listens from `start` to `close`.

    receiver = CollectiveReceiver(mirror, token)
    await receiver.start("tcp:10.0.0.2:0")
    await receiver.run(communicator, peer=0)             # one epoch, again with the next one
    """

    def __init__(self, mirror: Mirror, token: str, config: LinkConfig | None = None) -> None:
        super().__init__("the mirror's node", token, lambda ring, capacity: mirror, config)
        self.mirror = mirror
        self._way: _Way | None = None
        self._opened: asyncio.Future[_PayloadReceiver]
        self._early: list[tuple[Stream, Frame]] = []  # senders of the next epoch wait until this end has come to it

    async def close(self) -> None:
        self._mirrors.clear()
        self._callers |= {stream for stream, _ in self._early}
        await super().close()

    async def run(self, communicator: Communicator, peer: int, *, device: str = "cpu") -> None:
        """Receive from rank `peer` until the epoch is over: GroupBroken, also when the sender does not connect in time."""
        self._way, self._opened = _Way(communicator, peer, device), asyncio.get_running_loop().create_future()
        session: _PayloadReceiver | None = None
        try:
            async with _one_epoch(communicator):
                early, self._early = self._early, []
                for stream, frame in [each for each in early if each[0].open]:  # who waited, and is still there
                    try:
                        self.frame(stream, frame, None)
                    except RondoError as error:
                        self.lost(stream, error)
                async with waiting("link accept", peer=self.mirror.name, deadline_s=communicator.spec.timeout_s):
                    session = await self._opened
                await session.ended
        finally:
            self._way = None
            if session is not None:
                session.close()

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        if frame.kind == OPEN and (self._way is None or self._opened.done()):
            self._callers.discard(stream)
            self._early.append((stream, frame))
        else:
            super().frame(stream, frame, memory)

    def _open(self, stream: Stream, request: dict[str, Any]) -> None:
        wanted = {"ring": self.mirror.name, "epoch": self._way.epoch if self._way is not None else None, "stream": 0}
        told = {key: request.get(key) for key in wanted}
        if told != wanted:
            raise Refused(f"a link to {self.mirror.name} must open {wanted}, got {told}.")
        super()._open(stream, request)

    def _session(self, mirror: Mirror, terms: LinkConfig, stream: Stream) -> ReceiverSession:
        assert self._way is not None
        made = _PayloadReceiver(self, mirror, terms, stream, self._way)
        self._opened.set_result(made)
        return made


class _PayloadReceiver(ReceiverSession):
    """Takes payloads in the order in which they are announced. `ended` has the error that ended the epoch."""

    def __init__(self, receiver: LinkReceiver, mirror: Mirror, terms: LinkConfig, stream: Stream, way: _Way) -> None:
        super().__init__(receiver, mirror, terms, stream)
        self._way, self._staging = way, torch.empty(terms.chunk_bytes, dtype=torch.uint8, device=way.device)
        self._announced: asyncio.Queue[Frame] = asyncio.Queue()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._crossing = self._loop.create_task(self._cross())

    def close(self) -> None:
        super().close()
        self._crossing.cancel()

    def frame(self, stream: Stream, frame: Frame, memory: memoryview | None) -> None:
        if frame.kind != PAYLOAD:
            super().frame(stream, frame, memory)
        elif frame.extra > self.terms.chunk_bytes:
            raise ProtocolError(
                f"a payload must have at most {self.terms.chunk_bytes} bytes at once, got {frame.extra}."
            )
        else:
            self.mirror.target(frame.pos, frame.extra)
            self._announced.put_nowait(frame)

    def refuse(self, pos: int, num_bytes: int) -> None:
        raise ProtocolError(f"the descriptor at {pos} must match its checksum, got another. Join the next epoch.")

    def lost(self, stream: Stream, error: Exception) -> None:
        super().lost(stream, error)
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _cross(self) -> None:
        try:
            while True:
                frame = await self._announced.get()
                data = self._staging[: frame.extra]
                await asyncio.to_thread(self._way.communicator.recv, data, self._way.peer)
                if self.terms.checksum != "none" and self._checksum(data.cpu().numpy().data) != frame.checksum:
                    super().refuse(frame.pos, frame.extra)
                    continue
                if isinstance(self.mirror, DeviceMirror):
                    self.mirror.store_payload(frame.pos, data)
                else:
                    self.mirror.target(frame.pos, frame.extra)[:] = data.cpu().numpy().data
                self.arrived(frame.pos, frame.extra)
        except Exception as error:  # noqa: BLE001  # whatever it is, it ends the epoch, and is raised by `run`
            self.lost(self.streams[0], error)
