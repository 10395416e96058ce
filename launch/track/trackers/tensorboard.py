"""TensorBoard: an event file, written without TensorBoard.

Owns the bytes: TFRecord frames of `Event` messages with plain float summaries, one frame a point. The file itself says which
points it has: frame n + 1 is point n, behind the frame of the version and without those of a restart; what is left of a torn one
is cut off. A frame's bytes follow from its point, so that one that is written again is what a reader saw before.

    frame: length u64 | crc(length) u32 | message | crc(message) u32          crc: CRC-32C, masked
"""

from __future__ import annotations

import math
import os
import struct

from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig

_LENGTH, _HEAD, _CRC = struct.Struct("<Q"), struct.Struct("<QI"), struct.Struct("<I")
_RESTART = b"\x3a\x02\x08\x01"
"""A session that starts, `Event.session_log`, with which such a frame begins."""
_POLYNOMIAL = 0x82F63B78


class TensorBoard:
    """One event file, at its end."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        folder = run.path / "tensorboard" if config.folder is None else config.folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{run.begun}.{run.id}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        num_frames, end = self._whole()
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        self._pending = bytearray(b"" if num_frames else _frame(_field(3, b"brain.Event:2")))
        self.last = max(num_frames - 1, 0)

    def log(self, point: Point) -> None:
        values = b"".join(
            _field(1, _field(1, name.encode()) + b"\x15" + _float(value)) for name, value in point.values.items()
        )
        at = b"\x09" + struct.pack("<d", point.time) + b"\x10"
        if point.went_back_to is not None:  # TensorBoard forgets what is of this step, and of later ones
            self._pending += _frame(_RESTART + at + _varint(point.went_back_to))
        self._pending += _frame(at + _varint(point.step) + _field(5, values))

    def flush(self) -> bool:
        while self._pending:
            del self._pending[: os.write(self._fd, self._pending)]
        os.fsync(self._fd)
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _whole(self) -> tuple[int, int]:
        """How many frames are whole, and where they end."""
        size, at, num = os.fstat(self._fd).st_size, 0, 0
        while len(head := os.pread(self._fd, _HEAD.size, at)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            end = at + _HEAD.size + length + _CRC.size
            if end > size or crc != _masked(head[: _LENGTH.size]):
                break
            restarts = os.pread(self._fd, len(_RESTART), at + _HEAD.size) == _RESTART
            at, num = end, num + (not restarts)
        return num, at


def _frame(message: bytes) -> bytes:
    length = _LENGTH.pack(len(message))
    return length + _CRC.pack(_masked(length)) + message + _CRC.pack(_masked(message))


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _step(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ _POLYNOMIAL * (byte & 1)
    return byte


_TABLE = [_step(byte) for byte in range(256)]


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


open = TensorBoard
