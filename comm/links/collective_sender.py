"""The sending end of a link over a process group: one ring, to one mirror. `collective.py` has the protocol and its invariants.

Owns what was sent and what the receiver told. Does not own the ring: the coordinator holds its tail at `released`, or at
`mirrored` where the mirror lies in host memory.

    sender = CollectiveSender(segment, "ring/rollout-0/0", token=token, attempt=0)
    await sender.run(address, communicator, peer=1)      # one epoch, again with the next one
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from rondo.comm.groups.communicators import Communicator
from rondo.comm.links.collective import group_name, one_epoch, read_frame, rung, together
from rondo.comm.links.config import LinkConfig
from rondo.comm.links.frames import (
    BEAT,
    CHECKSUMS,
    CREDIT,
    DATA,
    MAX_BODY_BYTES,
    OPEN,
    OPENED,
    PAYLOAD,
    REFUSAL,
    RESEND,
    pack_frame,
    pack_hello,
    pack_json,
    refusal,
    unpack_json,
)
from rondo.comm.links.pieces import Pieces
from rondo.comm.ring.ring import Memory
from rondo.runtime.actors.transport import parse_address
from rondo.runtime.errors import (
    ConfigError,
    ProtocolError,
)
from rondo.runtime.waits import waiting


class CollectiveSender:
    """One ring to one mirror. `mirrored` and `released` are log offsets, as the receiver last told them."""

    def __init__(
        self, segment: Memory, ring: str, *, token: str, attempt: int, incarnation: int = 0,
        config: LinkConfig | None = None,
    ) -> None:  # fmt: skip
        self.ring, self.config = ring, config or LinkConfig()
        self.mirrored = self.released = 0
        self.counts: Counter[str] = Counter()
        self._origin = Pieces(segment, ring)
        self._token = token
        self._identity = {"ring": ring, "attempt": attempt, "incarnation": incarnation}
        self._work, self._moved = asyncio.Event(), asyncio.Event()

    async def run(self, address: str, communicator: Communicator, peer: int, *, device: str = "cpu") -> None:
        """Mirror to rank `peer` until the epoch is over: GroupBroken. `device` is the group's. Refused, CorruptData: no use."""
        async with one_epoch(communicator) as sockets:
            sock = await self._connect(address, communicator, sockets)
            await together(self._listen(sock), self._send(sock, communicator, peer, device))

    def wake(self) -> None:
        """Records became visible in the ring. To be called on the loop."""
        self._origin.look()
        self._work.set()

    async def mirrored_upto(self, pos: int, *, deadline_s: float) -> None:
        """Wait until the mirror shows everything before log offset `pos`. Raises DeadlineExceeded."""
        await self._upto("link mirrored", lambda: self.mirrored >= pos, deadline_s)

    async def released_upto(self, pos: int, *, deadline_s: float) -> None:
        """Wait until the other node let go of everything before log offset `pos`. Raises DeadlineExceeded."""
        await self._upto("link released", lambda: self.released >= pos, deadline_s)

    def close(self) -> None:
        """Let go of the ring, after `run` has ended."""
        self._origin.close()

    async def _upto(self, name: str, reached: Callable[[], bool], deadline_s: float) -> None:
        async with waiting(name, peer=self.ring, deadline_s=deadline_s):
            while not reached():
                self._moved.clear()
                await self._moved.wait()

    async def _connect(self, address: str, communicator: Communicator, sockets: contextlib.ExitStack) -> socket.socket:
        target, config, loop = parse_address(address), self.config, asyncio.get_running_loop()
        if not isinstance(target, tuple):
            raise ConfigError(f"the address of a link must look like 'tcp:host:port', got {address!r}.")
        terms = {"tail": self._origin.tail, "capacity": self._origin.capacity, "epoch": group_name(communicator)}
        terms |= {"checksum": config.checksum, "chunk_bytes": config.chunk_bytes}
        async with waiting("link connect", peer=address, deadline_s=config.connect_s):
            family, kind, protocol, _, where = (await loop.getaddrinfo(*target, type=socket.SOCK_STREAM))[0]
            sock = sockets.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = pack_hello(self._token, f"link {self.ring}")
            await loop.sock_sendall(sock, hello + pack_json(OPEN, self._identity | terms))
            frame, body = await read_frame(sock, MAX_BODY_BYTES, config.connect_s)
        answer = unpack_json(frame, body)
        if frame.kind == REFUSAL:
            raise refusal(answer)
        if frame.kind != OPENED:
            raise ProtocolError(f"a link's receiver must answer with OPENED or REFUSAL, got kind {frame.kind}.")
        self._origin.start(int(answer["head"]), int(answer["seq"]), [(int(a), int(b)) for a, b in answer["have"]])
        self._tell(int(answer["head"]), int(answer["tail"]))
        return sock

    def _tell(self, mirrored: int, released: int) -> None:
        self.mirrored, self.released = mirrored, released
        self._moved.set()
        self._work.set()

    async def _listen(self, sock: socket.socket) -> None:
        while True:
            frame, _ = await read_frame(sock, 0, self.config.silent_s)
            if frame.kind == CREDIT and self.released <= frame.extra <= frame.pos <= self._origin.head:
                self._tell(frame.pos, frame.extra)
            elif frame.kind == RESEND:
                self.counts["num_resent"] += 1
                self._origin.again(frame.pos, frame.extra)
                self._work.set()
            elif frame.kind != BEAT:
                raise ProtocolError(f"a link's receiver must send CREDIT, RESEND or BEAT, got kind {frame.kind}.")

    async def _send(self, sock: socket.socket, communicator: Communicator, peer: int, device: str) -> None:
        loop, config, origin = asyncio.get_running_loop(), self.config, self._origin
        checksum = CHECKSUMS[config.checksum]
        host = torch.empty(config.chunk_bytes, dtype=torch.uint8)
        there = host if device == "cpu" else torch.empty_like(host, device=device)
        while True:
            self._work.clear()
            piece = origin.piece(config.chunk_bytes, self.released + origin.capacity)
            if piece is None:
                if not await rung(self._work, config.beat_s):
                    await loop.sock_sendall(sock, pack_frame(BEAT))
                continue
            pos, num_bytes, is_payload = piece
            chunk = origin.view(pos, num_bytes)
            self.counts["num_bytes"] += num_bytes
            if not is_payload:
                head = pack_frame(DATA, pos, checksum=checksum(chunk), body_bytes=num_bytes)
                await loop.sock_sendall(sock, head + bytes(chunk))
                continue
            host.numpy()[:num_bytes] = np.frombuffer(chunk, np.uint8)
            if there is not host:
                there[:num_bytes].copy_(host[:num_bytes])
            frame = pack_frame(PAYLOAD, pos, num_bytes, checksum(host.numpy()[:num_bytes].data))
            await loop.sock_sendall(sock, frame)
            await asyncio.to_thread(communicator.send, there[:num_bytes], peer)
