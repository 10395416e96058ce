"""Settings of media: where they may come from, how large they may be, and into how many tokens they are made.

Owns the limits. Does not own which columns hold media (`DataConfig.media_columns`) or how a model's processor works.
Imports no torch.

    MediaConfig(allowed_hosts=("data.example.org",), image_max_tokens=1024, fps=1.0)

Invariant: a medium beyond a limit is either scaled into it (pixels, frames, sample rate) or its row is refused by name; none is
cut silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from rondo.runtime.section import Section


class MediaConfig(Section):
    """Limits of image, audio and video, for training, evaluation and warm-up alike."""

    root: Path | None = None
    """Where relative paths start; None is the folder of the data file, or the working directory."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that media URLs may name, also after a redirect; without any, URLs are refused."""
    max_file_bytes: int = Field(256 << 20, ge=1)
    """Of one medium as it is stored or sent."""
    max_source_pixels: int = Field(100_000_000, ge=1)
    """Of one image or video frame, read from its header before anything is decoded."""
    max_source_s: float = Field(3600.0, gt=0)
    """Length of one audio or video."""
    image_min_tokens: int = Field(4, ge=1)
    """An image is scaled up so that it takes no fewer tokens."""
    image_max_tokens: int = Field(16_384, ge=1)
    """An image is scaled so that it takes between so many tokens."""
    video_min_tokens: int = Field(128, ge=1)
    """The same for every frame of a video."""
    video_max_tokens: int = Field(768, ge=1)
    """The same for every frame of a video."""
    fps: float = Field(2.0, gt=0)
    """Frames taken from a second of video."""
    min_frames: int = Field(4, ge=2, multiple_of=2)
    """Fewest frames taken from a whole video, whatever `fps` asks for; two make a patch."""
    max_frames: int = Field(768, ge=2, multiple_of=2)
    """Frames taken from a whole video, whatever `fps` asks for; two make a patch."""
    audio_sample_rate: int = Field(16_000, ge=1000)
    """Hz that sound is resampled to: what the model's feature extractor expects."""
    use_audio_in_video: bool = False
    """Whether a video brings its sound track along, unless its row says otherwise."""
    whole_positions: bool | None = None
    """Whether positions in time, which are fractions for some videos, are cut to whole numbers, for engine and trainer alike;
    None: where SGLang generates, whose servers do so."""
    num_workers: int = Field(1, ge=1)
    """Processes that read, decode and process media, for each rollout replica."""
    deadline_s: float = Field(30.0, gt=0)
    """What the media of one prompt may take; then the worker is killed and the row counts as failed."""
    max_group_bytes: int = Field(32 << 20, ge=1 << 10)
    """Of the processed media of one prompt; so much room is reserved for each prompt group in its ring."""
    max_turn_bytes: int = Field(0, ge=0)
    """The same of what environments and workflows show one sample behind its prompt, reserved for each sample; 0: text alone."""

    def refused(self) -> Iterator[str]:
        for low, high in (
            ("image_min_tokens", "image_max_tokens"),
            ("video_min_tokens", "video_max_tokens"),
            ("min_frames", "max_frames"),
        ):
            if getattr(self, low) > getattr(self, high):
                yield (
                    f"media.{low} must be at most media.{high}, got {getattr(self, low)} and {getattr(self, high)}. "
                    "Exchange them"
                )

    def limits(self) -> dict[str, Any]:
        """JSON values for a worker process; `MediaConfig(**limits)` is an equal config."""
        return self.model_dump(mode="json")
