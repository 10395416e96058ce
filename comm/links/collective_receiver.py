"""The receiving end of a link over a process group: one mirror. `collective.py` has the protocol and its invariants.

Owns the listener and admission (token, ring, group and epoch). Does not own the mirror, which outlives epochs.

    receiver = CollectiveReceiver(mirror, token)
    receiver.start("tcp:10.0.0.2:0")
    await receiver.run(communicator, peer=0)             # one epoch, again with the next one
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import torch

from rondo.comm.groups.communicators import Communicator
from rondo.comm.links.collective import group_name, one_epoch, read_frame, rung, together
from rondo.comm.links.config import LinkConfig
from rondo.comm.links.device_ring import DeviceMirror
from rondo.comm.links.frames import (
    BEAT,
    CHECKSUMS,
    CREDIT,
    DATA,
    HELLO_BYTES,
    MAX_BODY_BYTES,
    OPEN,
    OPENED,
    PAYLOAD,
    RESEND,
    Frame,
    check_hello,
    pack_frame,
    pack_json,
    pack_refusal,
    unpack_json,
)
from rondo.comm.links.mirror import Mirror
from rondo.comm.links.sender import receive
from rondo.runtime.actors.transport import HELLO_S, parse_address
from rondo.runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerGone,
    ProtocolError,
    Refused,
    RondoError,
)
from rondo.runtime.waits import waiting


class CollectiveReceiver:
    """One mirror, fed by one sender an epoch. The caller keeps and closes the mirror. Listens from `start` to `close`."""

    def __init__(self, mirror: Mirror, token: str, config: LinkConfig | None = None) -> None:
        self.mirror, self.config, self.address = mirror, config or LinkConfig(), ""
        self._token = token
        self._listener: socket.socket | None = None
        self._work = asyncio.Event()
        self._again: list[bytes] = []

    def start(self, address: str = "tcp:127.0.0.1:0") -> None:
        """Listen; `address` then has the port. Raises OSError when it is taken."""
        target = parse_address(address)
        if not isinstance(target, tuple):
            raise ConfigError(f"links must listen at 'tcp:host:port', got {address!r}.")
        self._listener = socket.create_server(target)
        self._listener.setblocking(False)
        self.address = "tcp:{}:{}".format(*self._listener.getsockname()[:2])

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def release(self, upto_pos: int) -> None:
        """Let go of everything in the mirror before `upto_pos`, the end of a record."""
        self.mirror.release(upto_pos)
        self._work.set()

    async def run(self, communicator: Communicator, peer: int, *, device: str = "cpu") -> None:
        """Receive from rank `peer` until the epoch is over: GroupBroken, also when the sender does not connect in time."""
        async with one_epoch(communicator) as sockets:
            async with waiting("link accept", peer=self.mirror.name, deadline_s=communicator.spec.timeout_s):
                sock, terms = await self._accept(communicator, sockets)
            await together(self._tell(sock), self._receive(sock, communicator, peer, terms, device))

    async def _accept(
        self, communicator: Communicator, sockets: contextlib.ExitStack
    ) -> tuple[socket.socket, dict[str, Any]]:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            sockets.callback(sock.close)
            sock.setblocking(False)
            try:
                async with waiting("link hello", peer="a caller", deadline_s=HELLO_S):
                    try:
                        check_hello(await receive(sock, HELLO_BYTES), self._token)
                        frame, body = await read_frame(sock, MAX_BODY_BYTES, HELLO_S)
                        terms = unpack_json(frame, body)
                        self._admit(frame, terms, communicator)
                        mirror = self.mirror
                        cursor = {"head": mirror.head, "tail": mirror.tail, "seq": mirror.seq, "have": mirror.have()}
                        await loop.sock_sendall(sock, pack_json(OPENED, cursor))
                        return sock, terms
                    except PeerGone:
                        sock.close()
                    except RondoError as error:
                        await loop.sock_sendall(sock, pack_refusal(error))
                        sock.close()
            except (OSError, DeadlineExceeded):
                sock.close()  # it left or was silent; another one may be the sender

    def _admit(self, frame: Frame, terms: dict[str, Any], communicator: Communicator) -> None:
        mirror, wanted = self.mirror, {"ring": self.mirror.name, "capacity": self.mirror.capacity}
        wanted["epoch"] = group_name(communicator)
        told = {key: terms.get(key) for key in wanted}
        if frame.kind != OPEN or told != wanted or terms.get("checksum") not in CHECKSUMS:
            raise Refused(f"a link to {mirror.name} must open {wanted}, got kind {frame.kind} and {told}.")
        numbers = [terms.get(key) for key in ("attempt", "incarnation", "tail", "chunk_bytes")]
        if not all(isinstance(number, int) for number in numbers):
            raise ProtocolError(f"an OPEN must name attempt, incarnation, tail and chunk_bytes, got {numbers}.")
        LinkConfig(chunk_bytes=terms["chunk_bytes"])
        mirror.admit(terms["attempt"], terms["incarnation"], terms["tail"])
        mirror.keep(1024)

    async def _tell(self, sock: socket.socket) -> None:
        loop, told = asyncio.get_running_loop(), (-1, -1)
        while True:
            now = (self.mirror.head, self.mirror.tail)
            frames, self._again = self._again, []
            if now != told:
                told = now
                frames.append(pack_frame(CREDIT, *now))
            await loop.sock_sendall(sock, b"".join(frames) or pack_frame(BEAT))
            if not self._again:
                await rung(self._work, self.config.beat_s)
            self._work.clear()

    async def _receive(
        self, sock: socket.socket, communicator: Communicator, peer: int, terms: dict[str, Any], device: str
    ) -> None:
        mirror, checksum, most = self.mirror, CHECKSUMS[terms["checksum"]], terms["chunk_bytes"]
        staging = torch.empty(most, dtype=torch.uint8, device=device)
        self._again = []
        while True:
            frame, body = await read_frame(sock, most, self.config.silent_s)
            pos, num_bytes = frame.pos, frame.extra
            if frame.kind == DATA:
                if checksum(memoryview(body)) != frame.checksum:
                    raise ProtocolError(f"the descriptor at {pos} must match its checksum {frame.checksum:08x}.")
                mirror.target(pos, len(body))[:] = body
                num_bytes = len(body)
            elif frame.kind == PAYLOAD and num_bytes <= most:
                mirror.target(pos, num_bytes)
                data = staging[:num_bytes]
                await asyncio.to_thread(communicator.recv, data, peer)
                if terms["checksum"] != "none" and checksum(data.cpu().numpy().data) != frame.checksum:
                    mirror.num_refused_chunks += 1
                    self._again.append(pack_frame(RESEND, pos, num_bytes))
                    self._work.set()
                    continue
                if isinstance(mirror, DeviceMirror):
                    mirror.store_payload(pos, data)
                else:
                    mirror.target(pos, num_bytes)[:] = data.cpu().numpy().data
            elif frame.kind == BEAT:
                continue
            else:
                raise ProtocolError(
                    f"a sender must send DATA, PAYLOAD or BEAT, got kind {frame.kind} with {num_bytes}."
                )
            if mirror.arrived(pos, num_bytes):
                self._work.set()
