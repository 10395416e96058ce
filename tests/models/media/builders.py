"""Pictures, sounds and videos made on the spot, as bytes of ordinary files."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

SOUND_RATE = 16_000


def picture(width: int = 90, height: int = 70) -> Image.Image:
    """A smooth one, so that ways to scale it differ little."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 2 % 256, y * 2 % 256, (x + y) % 256], -1).astype(np.uint8))


def image_bytes(width: int = 90, height: int = 70, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture(width, height).save(file, kind, **options)
    return file.getvalue()


def bomb_bytes(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of a few hundred bytes whose header announces gigabytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tone(seconds: float, rate: int = SOUND_RATE, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def sound_bytes(
    seconds: float = 1.0, rate: int = SOUND_RATE, channels: int = 1, announced_rate: int | None = None
) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        samples = (tone(seconds, rate) * 32767).astype("<i2")
        writer.writeframes(np.repeat(samples, channels).tobytes())
    data = bytearray(file.getvalue())
    if announced_rate is not None:
        data[24:28] = struct.pack("<I", announced_rate)
    return bytes(data)


def video_bytes(
    folder: Path,
    num_frames: int = 20,
    fps: int = 10,
    *,
    width: int = 96,
    height: int = 64,
    sound: bool = False,
    noise: bool = False,
) -> bytes:
    """An MP4 whose header comes first; frame i is grey 10 * i, or noise that compresses to some bytes."""
    path = folder / f"made-{num_frames}-{fps}-{width}-{height}-{sound}-{noise}.mp4"
    rng = np.random.default_rng(0)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        pictures = container.add_stream("mpeg4", rate=fps)
        pictures.width, pictures.height, pictures.pix_fmt = width, height, "yuv420p"
        track = container.add_stream("aac", rate=SOUND_RATE, layout="mono") if sound else None
        for index in range(num_frames):
            shown = np.full((height, width, 3), index * 10 % 250, np.uint8)
            if noise:
                shown = rng.integers(0, 255, shown.shape, dtype=np.uint8)
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(shown, "rgb24")))
        container.mux(pictures.encode())
        if track is not None:
            samples = (tone(max(num_frames, fps) / fps) * 32767).astype(np.int16)[None]
            heard = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            heard.sample_rate = SOUND_RATE
            container.mux(track.encode(heard))
            container.mux(track.encode())
    data = path.read_bytes()
    path.unlink()
    return data
