"""What crosses a link: the heads of its frames, and the checksums of chunks.

Owns the meaning of the bytes between two nodes. Does not own how a stream is cut into frames, the hello before them and a refusal
(`runtime/actors/transport.py`), when one is sent (`sender.py`, `receiver.py`), nor where a chunk lies (`origin.py`, `mirror.py`).

    sender -> receiver   OPEN {ring, capacity, ...}    DATA pos, num_bytes, checksum | a chunk of the log       BEAT
                         PAYLOAD pos, num_bytes: these cross beside the stream (`collective.py`)
    receiver -> sender   OPENED {head, tail, have}     CREDIT head, tail     RESEND pos, num_bytes              BEAT

Invariant: nothing of a frame is used before the CRC-32 of its kind and head agrees, and no chunk is received before its place and
size are checked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from rondo.comm.weights.sums import bucket_sum
from rondo.runtime.errors import ProtocolError

OPEN, OPENED, DATA, CREDIT, RESEND, BEAT, PAYLOAD = range(16, 23)  # the transport's own kinds are below

_CRC = struct.Struct("<I")
_FIELDS = struct.Struct("<QQI")


class Frame(NamedTuple):
    """A head. `pos` and `extra` as the kind says, `checksum` is the chunk's; `about` is the JSON object of OPEN and OPENED."""

    kind: int
    pos: int = 0
    extra: int = 0
    checksum: int = 0
    about: dict[str, Any] = {}  # noqa: RUF012  # never changed


def pack_head(frame: Frame) -> bytes:
    head = orjson.dumps(frame.about) if frame.kind in (OPEN, OPENED) else _FIELDS.pack(*frame[1:4])
    return _CRC.pack(zlib.crc32(head, frame.kind)) + head


def unpack_head(kind: int, data: memoryview) -> Frame:
    """Raises ProtocolError when it is none of a link's, or not as it was sent."""
    head = bytes(data[_CRC.size :])
    if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != zlib.crc32(head, kind):
        raise ProtocolError(f"a frame of a link must match its checksum, got kind {kind} with another. Connect again.")
    try:
        if kind not in (OPEN, OPENED):
            return Frame(kind, *_FIELDS.unpack(head))
        about = orjson.loads(head)
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"a frame of a link must have the head of its kind, got {error}. Connect again.") from error
    if not isinstance(about, dict):
        raise ProtocolError(f"a frame's head must be a JSON object, got {type(about).__name__}. Connect again.")
    return Frame(kind, about=about)


CHECKSUMS: dict[str, Callable[[memoryview], int]] = {"fold": bucket_sum, "crc32": zlib.crc32, "none": lambda _: 0}
"""Name -> function of a chunk's bytes to 32 bits: folded into column sums (`comm/weights/sums.py`), at several times the rate of
zlib's CRC-32 and for what damages chunks as good; "none" trusts the network."""
