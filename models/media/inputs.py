"""What the processor made of the media of one prompt: the arrays that engine and trainer both run on.

Owns their names and what can be read off them. Owns neither how they are made (`processor.py`) nor how several prompts come
together in a batch (`batch.py`). Imports numpy only.

Invariant: made once a prompt group, and equal for all its samples. `positions` comes with the other arrays, so nobody computes
multimodal rotary positions again; a response goes on at their maximum + 1 on all three axes.

    name                    dtype, shape                       of
    positions               float32 [3, T]                     every prompt token: time, height, width
    pixel_values            float32 [P, D], patches            image
    image_grid_thw          int64 [images, 3]                  image
    pixel_values_videos     float32 [P, D]                     video
    video_grid_thw          int64 [videos, 3]                  video
    input_features          float32 [audios, mel bins, F]      audio, also that of videos; padded to the longest
    feature_attention_mask  int32 [audios, F]                  audio, 1 = a frame of sound
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Modality = Literal["image", "audio", "video"]

_MADE_FROM: dict[Modality, str] = {
    "image": "pixel_values",
    "audio": "input_features",
    "video": "pixel_values_videos",
}
MODALITIES: tuple[Modality, ...] = tuple(_MADE_FROM)
KINDS = ("text", *MODALITIES, "mixed")
"""Of rows, for figures: those without media, those with each modality, and those with several."""
ARRAYS = (
    "positions", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "input_features",
    "feature_attention_mask",
)  # fmt: skip


def kinds_of(modalities: Sequence[str]) -> tuple[str, ...]:
    """Which of `KINDS` a row is that has these; with several it counts for each, and as mixed."""
    return (*modalities, "mixed") if len(modalities) > 1 else tuple(modalities) or ("text",)


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """Arrays by name, as in the table above. Equal keys mean equal contents."""

    key: str
    arrays: Mapping[str, np.ndarray] = field(repr=False)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Which towers have work."""
        return tuple(modality for modality, name in _MADE_FROM.items() if name in self.arrays)

    @property
    def positions(self) -> np.ndarray:
        """float32 [3, T]"""
        return self.arrays["positions"]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def encoder_positions(self) -> int:
        """Patches and frames of sound that the towers work on."""
        patches = sum(len(self.arrays[name]) for name in ("pixel_values", "pixel_values_videos") if name in self.arrays)
        sound = self.arrays.get("feature_attention_mask")
        return patches + (int(sound.sum()) if sound is not None else 0)


def contents_key(arrays: Mapping[str, np.ndarray]) -> str:
    """The key of these arrays: a hash of names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.view(np.uint8).reshape(-1).data)
    return digest.hexdigest()
