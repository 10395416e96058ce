"""The largest micro-batch, and the largest prompts, that a job's settings allow: what a trace computes on.

Owns how long samples are, which media fill their prompts, and how many of them come at once. Does not own what becomes of them
(`trace.py`). Their contents are zeros.

    Rows.of(config, model_config).micro_batch()     ->   [TrainRow, ...]

A row of text has a prompt of its own. Where rows have media, their prompts are full of one kind each, the costliest first, as far
as `media.max_group_bytes` goes: pictures of `media.image_max_tokens`, a video of `media.max_frames` frames of
`media.video_max_tokens`, a sound of `media.max_source_s`. Such rows of a group share a micro-batch as far as it has room, so of
those that it is cut into at most as many share media as are left over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.launch.check.estimate import prefill_tokens
from rondo.models.families import family_of
from rondo.models.media.config import MediaConfig
from rondo.models.media.inputs import MediaInputs, Modality
from rondo.models.packing import Sequence as Packable
from rondo.roles.config import JobConfig
from rondo.roles.training.objective import TrainRow, untold

_HOP = 160
"""Samples of sound from one frame of its features to the next."""
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class _Full:
    """A prompt's media."""

    placeholder: int
    num_tokens: int
    arrays: dict[str, np.ndarray]

    @property
    def positions(self) -> int:
        """That its encoders compute."""
        return MediaInputs("", self.arrays).encoder_positions


@dataclass(frozen=True, slots=True)
class Rows:
    config: JobConfig
    prompts: Sequence[_Full]
    """Of each kind of media that rows have, the costliest first; none where they are text."""

    @classmethod
    def of(cls, config: JobConfig, model_config: Any) -> Rows:
        family, media = family_of(model_config), config.media
        if family is None or media is None:
            return cls(config, ())
        room = config.rollout.max_prompt_tokens - 1
        kinds = [kind for kind in config.data.media_columns or family.modalities if kind in family.modalities]
        full = [_filled(kind, media, model_config, room) for kind in kinds]
        return cls(config, sorted(full, key=lambda each: -each.positions))

    def micro_batch(self, *, shorter: bool = False) -> list[TrainRow]:
        """As many of the longest samples as fit, and a shorter one that fills it. shorter: half the tokens of each, or of its
        response where there are media."""
        rollout, room = self.config.rollout, self.config.train.micro_batch_tokens
        whole, share = rollout.max_prompt_tokens + rollout.max_new_tokens, self._share()
        number = self.num_whole()
        rest = room - number * (whole + share)
        lengths = [whole] * number + [rest] * (rest > 1)
        if self.prompts and shorter:
            return [self._row(at, length - rollout.max_new_tokens // 2) for at, length in enumerate(lengths[:number])]
        return [self._row(at, -(-length // 2) if shorter else length) for at, length in enumerate(lengths)]

    def num_whole(self) -> int:
        """How many of the longest samples fit."""
        rollout, room = self.config.rollout, self.config.train.micro_batch_tokens
        return max(1, room // (rollout.max_prompt_tokens + rollout.max_new_tokens + self._share()))

    def prefill(self) -> list[Packable]:
        """The longest prompts that an engine takes in at once."""
        length, most = self.config.rollout.max_prompt_tokens, max((full.positions for full in self.prompts), default=0)
        number = max(1, -(-prefill_tokens(self.config) // (length + most)))
        prompts = [Packable(self._tokens(at, length, at), 1, self._media(at)) for at in range(number)]
        return prompts

    def _share(self) -> int:
        """Of a prompt's media, what each of its samples costs."""
        return -(-max((full.positions for full in self.prompts), default=0) // self.config.rollout.samples_per_prompt)

    def _row(self, number: int, length: int) -> TrainRow:
        rollout = self.config.rollout
        prompt, media = number, None
        if self.prompts and number < self.num_whole():
            samples, fit = rollout.samples_per_prompt, self.num_whole()
            prompt = number // ((samples % fit or fit) if fit <= samples else samples)
            media = self._media(prompt)
        response = min(max(rollout.max_new_tokens, length - rollout.max_prompt_tokens), length - 1)
        if media is not None:
            response = length - rollout.max_prompt_tokens
        tokens, column = self._tokens(number, length, None if media is None else prompt), np.zeros(response, np.float32)
        versions = np.zeros(response, np.int32)
        return TrainRow(
            tokens, np.ones(response, np.uint8), column, column, column, column, versions, media=media,
            **untold(self.config.distillation, response),
        )  # fmt: skip

    def _tokens(self, number: int, length: int, prompt: int | None) -> np.ndarray:
        """`number`, or the `prompt` that several have, is what no other prompt begins with."""
        tokens = np.ones(length, np.int32)
        tokens[0] = number if prompt is None else prompt
        if self.prompts and prompt is not None:
            full = self.prompts[prompt % len(self.prompts)]
            tokens[1 : 1 + full.num_tokens] = full.placeholder
        return tokens

    def _media(self, prompt: int) -> MediaInputs | None:
        if not self.prompts:
            return None
        positions = np.tile(np.arange(self.config.rollout.max_prompt_tokens, dtype=np.float32), (3, 1))
        return MediaInputs(str(prompt), self.prompts[prompt % len(self.prompts)].arrays | {"positions": positions})


def _filled(kind: Modality, media: MediaConfig, config: Any, room: int) -> _Full:
    """A prompt with `room` for placeholders."""
    family = family_of(config)
    assert family is not None
    placeholder = int(getattr(config, family.placeholders[kind]))
    if kind == "audio":
        return _sound(placeholder, media, config, room)
    vision, video = config.vision_config, kind == "video"
    side = vision.spatial_merge_size
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    room = max(1, min(room, media.max_group_bytes // (side**2 * size * _FLOAT)))
    tokens = min(media.video_max_tokens if video else media.image_max_tokens, room)
    tall = math.isqrt(tokens)
    wide = tokens // tall
    depth = min(media.max_frames // vision.temporal_patch_size, room // tokens) if video else 1
    number = room // (depth * tokens)
    patches = np.zeros((number * depth * tall * wide * side**2, size), np.float32)
    grid = np.array([[depth, tall * side, wide * side]] * number, np.int64)
    names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    return _Full(placeholder, number * depth * tall * wide, dict(zip(names, (patches, grid), strict=True)))


def _sound(placeholder: int, media: MediaConfig, config: Any, room: int) -> _Full:
    family, mel_bins = family_of(config), config.audio_config.num_mel_bins
    assert family is not None and family.sound_tokens is not None
    frames = min(
        int(media.max_source_s * media.audio_sample_rate) // _HOP, media.max_group_bytes // (mel_bins * _FLOAT)
    )
    low = 1
    while low < frames:  # the most whose tokens have room
        middle = (low + frames + 1) // 2
        fits = int(family.sound_tokens(config, np.array([middle])).sum()) <= room
        low, frames = (middle, frames) if fits else (low, middle - 1)
    features, mask = np.zeros((1, mel_bins, frames), np.float32), np.ones((1, frames), np.int32)
    tokens = int(family.sound_tokens(config, np.array([frames])).sum())
    return _Full(placeholder, tokens, {"input_features": features, "feature_attention_mask": mask})
