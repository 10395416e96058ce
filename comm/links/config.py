"""What a link can be told, and what it tells of itself.

LinkConfig(num_streams=8, checksum="crc32")
"""

from __future__ import annotations

from dataclasses import dataclass

from rondo.comm.links.frames import CHECKSUMS
from rondo.comm.ring.records import ALIGN_BYTES
from rondo.runtime.errors import ConfigError

MAX_STREAMS = 64
MAX_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """How a sender works. A receiver takes `beat_s` and `silent_s` from its own, the rest from the sender's.

    A peer that gives no sign of life for `silent_s` is taken for gone. Lost connections are made again, with pauses that
    grow from `first_pause_s` to `longest_pause_s`, until `reconnect_s` have passed without progress; each attempt may take
    `connect_s`.
    """

    num_streams: int = 4
    chunk_bytes: int = 2 << 20
    checksum: str = "fold"
    connect_s: float = 10.0
    silent_s: float = 10.0
    beat_s: float = 1.0
    reconnect_s: float = 120.0
    first_pause_s: float = 0.02
    longest_pause_s: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_streams <= MAX_STREAMS:
            raise ConfigError(f"num_streams must be 1 to {MAX_STREAMS}, got {self.num_streams}. Leave it at 4.")
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES or self.chunk_bytes % ALIGN_BYTES:
            raise ConfigError(
                f"chunk_bytes must be a multiple of {ALIGN_BYTES} up to {MAX_CHUNK_BYTES}, got {self.chunk_bytes}. "
                "Leave it at its default."
            )
        if self.checksum not in CHECKSUMS:
            raise ConfigError(f"checksum must be one of {', '.join(CHECKSUMS)}, got {self.checksum!r}. Choose one.")
        if not 0 < self.beat_s < self.silent_s:
            raise ConfigError(
                f"beat_s must be above 0 and below silent_s ({self.silent_s:g}), got {self.beat_s:g}. Beat several times "
                "in silent_s."
            )


@dataclass(frozen=True, slots=True)
class LinkStats:
    """A sender at one moment. `state` says what it does or whom it waits for.

    `mirrored_pos` and `released_pos` are log offsets: up to where the mirror shows records, and up to where the other node
    let go of them. The counts are this process's own; `num_bytes` are payload bytes sent, chunks sent again included.
    """

    ring: str
    node: str
    state: str
    mirrored_pos: int
    released_pos: int
    num_bytes: int
    num_records: int
    num_chunks: int
    num_resent: int
    num_resumes: int
    num_stalls: int
    last_loss: str
