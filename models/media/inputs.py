"""What the processor made of the media of one prompt, or of one later turn: the arrays that engine and trainer both run on.

Owns their names and what can be read off them; and how the media of a sample's turns come to those of its prompt. Owns neither
how they are made (`processor.py`) nor how several prompts come together in a batch (`batch.py`). Imports numpy only.

Invariant: those of a prompt are made once a prompt group, and equal for all its samples. `positions` comes with the other arrays,
so nobody computes multimodal rotary positions again; a response goes on at their maximum + 1 on all three axes. A placeholder
among the tokens stands for a feature where `placed` says that media lie, and nowhere else: a policy can sample one.

    tokens     prompt | sampled | said, with an image | sampled        with_turns(prompt, [(where it begins, image)])
    positions  its own, then one after the other, those of the image behind them

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
ARRAYS = {
    "positions": np.float32, "pixel_values": np.float32, "image_grid_thw": np.int64, "pixel_values_videos": np.float32,
    "video_grid_thw": np.int64, "input_features": np.float32, "feature_attention_mask": np.int32,
}  # fmt: skip


def kinds_of(modalities: Sequence[str]) -> tuple[str, ...]:
    """Which of `KINDS` a row is that has these; with several it counts for each, and as mixed."""
    return (*modalities, "mixed") if len(modalities) > 1 else tuple(modalities) or ("text",)


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """Arrays by name, as in the table above. Equal keys mean equal contents. With `turns` (first token, media) the arrays are
    the positions of all tokens up to the last medium, and the others are those of the turns."""

    key: str
    arrays: Mapping[str, np.ndarray] = field(repr=False)
    turns: tuple[tuple[int, MediaInputs], ...] = field(default=(), repr=False)

    @property
    def placed(self) -> tuple[tuple[int, MediaInputs], ...]:
        """(token at which they begin, media), as they follow each other; they lie in as many tokens as they have positions."""
        return self.turns or ((0, self),)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Which towers have work."""
        return tuple(kind for kind, name in _MADE_FROM.items() if any(name in media.arrays for _, media in self.placed))

    @property
    def positions(self) -> np.ndarray:
        """float32 [3, T]"""
        return self.arrays["positions"]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for _, media in self.placed for array in media.arrays.values())

    @property
    def encoder_positions(self) -> int:
        """Patches and frames of sound that the towers work on."""
        if self.turns:
            return sum(media.encoder_positions for _, media in self.turns)
        patches = sum(len(self.arrays[name]) for name in ("pixel_values", "pixel_values_videos") if name in self.arrays)
        sound = self.arrays.get("feature_attention_mask")
        return patches + (int(sound.sum()) if sound is not None else 0)


def with_turns(prompt: MediaInputs | None, turns: Sequence[tuple[int, MediaInputs]]) -> MediaInputs | None:
    """The media of a prompt, None without, with those that turns behind it have from these tokens on, in their order."""
    if not turns:
        return prompt
    placed = (*(() if prompt is None else prompt.placed), *turns)
    found, length, after = list[np.ndarray](), 0, np.float32(0)
    for at, media in placed:
        text = after + np.arange(at - length, dtype=np.float32)
        found += [np.tile(text, (3, 1)), media.positions + (after + np.float32(len(text)))]
        length, after = at + media.positions.shape[1], found[-1].max() + 1
    key = " ".join(f"{at} {media.key}" for at, media in placed)
    positions = {"positions": np.concatenate(found, axis=1)}
    return MediaInputs(hashlib.blake2b(key.encode(), digest_size=16).hexdigest(), positions, placed)


def contents_key(arrays: Mapping[str, np.ndarray]) -> str:
    """The key of these arrays: a hash of names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def joined_sounds(items: Sequence[MediaInputs]) -> tuple[np.ndarray, np.ndarray]:
    """Features [audios, mel bins, F] and masks [audios, F] of all items, padded to the longest."""
    longest = max(item.arrays["input_features"].shape[2] for item in items)

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])

    features = np.concatenate([padded(item.arrays["input_features"]) for item in items])
    masks = np.concatenate([padded(item.arrays["feature_attention_mask"]) for item in items])
    return features, masks
