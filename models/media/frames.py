"""Frames to patches: the video processor of the Qwen families, without torchvision.

Owns the size that a picture is scaled to, and the order of its patches. Does not own decoding or scaling itself (`decode.py`).
What it gives equals transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor for the same frames, up to float32 rounding;
those need torchvision to be imported at all.

    fitted(70, 90, unit=32, min_tokens=4, max_tokens=64)     # (64, 96): 6 tokens
    FrameProcessor.load(path)(videos=[frames])             # {"pixel_values_videos": [P, D], "video_grid_thw": [1, 3], ...}

Invariant: height and width are multiples of `patch_size * merge_size`, so that every patch group becomes one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rondo.runtime.errors import ConfigError

MAX_ASPECT = 200
"""Longest side over shortest that the families' own processors take."""

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLVideoProcessor": {"patch_size": 14, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD},
    "Qwen3VLVideoProcessor": {"patch_size": 16, "image_mean": _HALF, "image_std": _HALF},
}
"""What transformers' classes assume where the folder says nothing."""


def fitted(height: int, width: int, *, unit: int, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """(height, width) in pixels, multiples of `unit`, of the same shape as nearly as possible, `unit` x `unit` pixels a token.

    The rule is Qwen2-VL's own. Raises ValueError for a shape longer than `MAX_ASPECT` times its width.
    """
    aspect = max(height, width) / min(height, width)
    if aspect > MAX_ASPECT:
        raise ValueError(f"long side must be at most {MAX_ASPECT} times the short one, got {aspect:g} times. Crop it")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    tall, wide = smart_resize(height, width, unit, min_tokens * unit**2, max_tokens * unit**2)
    return tall, wide


@dataclass(frozen=True, slots=True)
class FrameProcessor:
    """Takes the place of the library's video processor within its processors, so its names are theirs."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    model_input_names: tuple[str, ...] = ("pixel_values_videos", "video_grid_thw")

    @staticmethod
    def load(path: str) -> FrameProcessor:
        """From processor_config.json, video_preprocessor_config.json or preprocessor_config.json, in this order.

        Raises ConfigError for a video processor of another kind.
        """
        found = _settings(path)
        kind = found.get("video_processor_type") or (
            "Qwen2VLVideoProcessor" if "Omni" in found.get("processor_class", "") else "Qwen3VLVideoProcessor"
        )
        if kind not in _DEFAULTS:
            raise ConfigError(
                f"the video processor of {path!r} must be one of {', '.join(_DEFAULTS)} without torchvision, got {kind!r}. "
                "Install torchvision"
            )
        settings = _DEFAULTS[kind] | {name: value for name, value in found.items() if value is not None}
        return FrameProcessor(
            patch_size=settings["patch_size"],
            merge_size=settings.get("merge_size", 2),
            temporal_patch_size=settings.get("temporal_patch_size", 2),
            rescale_factor=settings.get("rescale_factor", 1 / 255),
            image_mean=tuple(settings["image_mean"]),
            image_std=tuple(settings["image_std"]),
        )

    def __call__(self, videos: Sequence[np.ndarray], *, video_metadata: Any = None, **_: Any) -> dict[str, Any]:
        """Each video uint8 [F, H, W, 3], scaled already -> float32 [P, D] and int64 [videos, 3]."""
        patches, grids = zip(*(self._patches(video) for video in videos), strict=True)
        return {
            "pixel_values_videos": np.concatenate(patches),
            "video_grid_thw": np.array(grids, np.int64),
            "video_metadata": video_metadata,
        }

    def _patches(self, video: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        depth, merge, side = self.temporal_patch_size, self.merge_size, self.patch_size
        if missing := -len(video) % depth:
            video = np.concatenate([video, np.repeat(video[-1:], missing, axis=0)])
        time, tall, wide = len(video) // depth, video.shape[1] // side, video.shape[2] // side
        mean = np.array(self.image_mean, np.float32) / np.float32(self.rescale_factor)
        std = np.array(self.image_std, np.float32) / np.float32(self.rescale_factor)
        values = (video.astype(np.float32) - mean) / std
        blocks = values.reshape(time, depth, tall // merge, merge, side, wide // merge, merge, side, 3)
        # (time, rows, columns of tokens, then rows, columns of patches in a token), (channel, frame, row, column in a patch)
        ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return ordered.reshape(time * tall * wide, 3 * depth * side * side), (time, tall, wide)


def _settings(path: str) -> dict[str, Any]:
    nested = read_json(path, "processor_config.json")
    if isinstance(nested.get("video_processor"), dict):
        return {"processor_class": nested.get("processor_class", ""), **nested["video_processor"]}
    return read_json(path, "video_preprocessor_config.json") or read_json(path, "preprocessor_config.json")


def read_json(path: str, file: str) -> dict[str, Any]:
    """A settings file of a model folder, or of a model on the hub; empty when there is no such file."""
    from transformers.utils import cached_file

    found = cached_file(path, file, _raise_exceptions_for_missing_entries=False)
    settings: dict[str, Any] = orjson.loads(Path(found).read_bytes()) if found else {}
    return settings
