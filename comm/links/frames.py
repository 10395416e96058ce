"""Frames of a link: one fixed header, and the checksums over what follows it.

Owns the bytes between two nodes. Does not own when a frame is sent (`sender.py`, `receiver.py`) nor where a chunk lies
(`origin.py`, `mirror.py`).

    hello   the 112 bytes of `runtime/actors/transport.py`, with the run's token, once a connection, client to server
    frame   header 40 B: magic kind checksum body_bytes pos extra crc32(of these) | body

    sender -> receiver   OPEN {ring, capacity, ...}    DATA pos, a chunk of the log    BEAT
                         PAYLOAD pos, num_bytes: these cross beside the stream (`collective.py`)
    receiver -> sender   OPENED {head, tail, have}     CREDIT head, tail     RESEND pos, num_bytes     BEAT     REFUSAL

Invariant: nothing of a header is used before its CRC-32 agrees, and no body is received before its size is checked.

Checksums of a chunk. "crc32" is zlib's, 4 GB/s on the core where this was measured. "fold" runs the same CRC-32 over two
foldings of the chunk, each the XOR of rows, 512 and 521 words of 8 bytes long: 15 GB/s. A burst within one row changes the
CRC as it would unfolded; two flipped bits cancel in one folding only at a multiple of its row, so never in both within
2 MiB; a row or page that stands in another's place keeps the first folding and changes the second. "none" trusts the network.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rondo.runtime.actors.transport import parse_address
from rondo.runtime.errors import TRAVELLERS, ConfigError, PeerGone, ProtocolError, RemoteError

LINK_VERSION = 1
OPEN, OPENED, DATA, CREDIT, RESEND, BEAT, REFUSAL, PAYLOAD = range(1, 9)
MAX_BODY_BYTES = 64 << 10
"""Limit on the JSON of OPEN, OPENED and REFUSAL."""

_MAGIC = b"RLNK"
_FIELDS = struct.Struct("<4sIIIQQ")
_CRC = struct.Struct("<I4x")
FRAME_BYTES = _FIELDS.size + _CRC.size
_FOLDS = (512, 521)
_MIN_FOLD_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Frame:
    """A header. `pos` and `extra` as the kind says; `checksum` is the body's."""

    kind: int
    checksum: int
    body_bytes: int
    pos: int
    extra: int


def pack_frame(kind: int, pos: int = 0, extra: int = 0, checksum: int = 0, body_bytes: int = 0) -> bytes:
    fields = _FIELDS.pack(_MAGIC, kind, checksum, body_bytes, pos, extra)
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack_frame(header: bytes | bytearray | memoryview) -> Frame:
    """Raises ProtocolError when it is no frame, or not as it was sent."""
    magic, kind, checksum, body_bytes, pos, extra = _FIELDS.unpack_from(header)
    (crc,) = _CRC.unpack_from(header, _FIELDS.size)
    if magic != _MAGIC or crc != zlib.crc32(memoryview(header)[: _FIELDS.size]):
        raise ProtocolError(
            f"a frame of a link must begin with a whole header, got {bytes(header[:8])!r}. Connect again."
        )
    return Frame(kind, checksum, body_bytes, pos, extra)


def pack_json(kind: int, value: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(value)
    return pack_frame(kind, checksum=zlib.crc32(body), body_bytes=len(body)) + body


def unpack_json(frame: Frame, body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of OPEN, OPENED or REFUSAL. Raises ProtocolError when its checksum or its JSON is wrong."""
    if zlib.crc32(body) != frame.checksum:
        raise ProtocolError(f"a frame's body must match its checksum {frame.checksum:08x}, got another. Connect again.")
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a frame's body must be JSON, got {error}. Connect again.") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"a frame's body must be a JSON object, got {type(value).__name__}. Connect again.")
    return value


def pack_refusal(error: Exception) -> bytes:
    return pack_json(REFUSAL, {"error": type(error).__name__, "text": str(error)[:4096]})


def refusal(told: Mapping[str, Any]) -> Exception:
    """The error that the other side refused with, of its own type where that travels."""
    kind, text = str(told.get("error")), str(told.get("text"))
    known = TRAVELLERS.get(kind)
    if known is None or issubclass(known, RemoteError) or kind == "DeadlineExceeded":
        return RemoteError(kind, text)
    return known(text)


# ---- before a stream is open ----------------------------------------------------------------------------------------


def tcp_target(address: str) -> tuple[str, int]:
    """Host and port of 'tcp:host:port'. Raises ConfigError."""
    target = parse_address(address)
    if not isinstance(target, tuple):
        raise ConfigError(f"the address of a link must look like 'tcp:host:port', got {address!r}. Name another node.")
    return target


async def receive(sock: socket.socket, num_bytes: int) -> bytearray:
    """Exactly `num_bytes`, and not one behind them. Raises PeerGone at the end of the stream."""
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        got = await asyncio.get_running_loop().sock_recv_into(sock, rest)
        if got == 0:
            raise PeerGone("a link's peer must stay until it is open, got the end of its stream. Connect again")
        rest = rest[got:]
    return data


async def receive_json(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Kind and JSON object of the next frame, which must be OPEN, OPENED or REFUSAL. Raises ProtocolError or PeerGone."""
    frame = unpack_frame(await receive(sock, FRAME_BYTES))
    if frame.kind not in (OPEN, OPENED, REFUSAL) or frame.body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a link must begin with OPEN, got kind {frame.kind}. Connect again.")
    return frame.kind, unpack_json(frame, await receive(sock, frame.body_bytes))


# ---- checksums ------------------------------------------------------------------------------------------------------


def _fold(chunk: memoryview) -> int:
    if len(chunk) < _MIN_FOLD_BYTES or len(chunk) % 8:
        return zlib.crc32(chunk)
    words = np.frombuffer(chunk, np.uint64)
    crc = 0
    for width in _FOLDS:
        num_rows = len(words) // width
        whole = num_rows * width
        crc = zlib.crc32(np.bitwise_xor.reduce(words[:whole].reshape(num_rows, width), axis=0).data, crc)
        crc = zlib.crc32(words[whole:].data, crc)
    return crc


def _none(chunk: memoryview) -> int:
    return 0


CHECKSUMS: dict[str, Callable[[memoryview], int]] = {"fold": _fold, "crc32": zlib.crc32, "none": _none}
"""Name -> function of a chunk's bytes to 32 bits."""
