"""A medium as a row names it, before anybody has looked at it.

Owns the kinds of sources and the JSON form of small ones. Reads nothing. Imports neither torch nor numpy.

    MediaRef("image", "cats/7.png")            a path, relative to `media.root`
    MediaRef("video", "https://host/a.mp4")    a URL, or a data URI
    MediaRef("audio", wav_bytes)               a file's bytes
    MediaRef("video", [png_bytes, png_bytes])  frames, in order

Invariant: a row holds references only; pixels and samples exist from `decode.py` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One medium. `use_audio` None follows `media.use_audio_in_video`; it means something for videos only."""

    kind: Kind
    source: str | bytes | list[str | bytes]
    use_audio: bool | None = None

    def __str__(self) -> str:
        """For messages: never the contents."""
        if isinstance(self.source, bytes):
            return f"{self.kind} of {len(self.source)} bytes"
        if isinstance(self.source, list):
            return f"{self.kind} of {len(self.source)} frames"
        if len(self.source) <= 80:
            return f"{self.kind} {self.source}"
        end = "" if self.source.startswith("data:") else self.source[-50:]  # a path's name says most
        return f"{self.kind} {self.source[:30]}...{end}"
