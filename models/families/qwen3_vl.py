"""Qwen3-VL, dense and with experts: images and videos, one vision tower for both.

A video is written as timestamps, each followed by the placeholders of its frames between vision start and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rondo.models.families.family import Family
from rondo.models.media.inputs import MediaInputs, contents_key


def positions(model: Any, tokens: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    """float32 [3, T] by the model's own rule, which needs no weights."""
    import torch

    config = model.config
    kinds = np.zeros_like(tokens)
    kinds[tokens == config.image_token_id] = 1
    kinds[tokens == config.video_token_id] = 2

    def grid(name: str) -> Any:
        return torch.from_numpy(arrays[name].copy()) if name in arrays else None

    found, _ = model.model.get_rope_index(
        torch.from_numpy(tokens.astype(np.int64))[None],
        torch.from_numpy(kinds.astype(np.int32))[None],
        image_grid_thw=grid("image_grid_thw"),
        video_grid_thw=grid("video_grid_thw"),
    )
    return np.asarray(found[:, 0], dtype=np.float32)


def vision_dummy(vision: Any) -> dict[str, np.ndarray]:
    """Arrays of the smallest image, and of the smallest video, that a Qwen vision tower takes."""
    side = vision.spatial_merge_size
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = np.array([[1, side, side]], np.int64)
    pixels = np.zeros((side * side, size), np.float32)
    return {"pixel_values": pixels, "image_grid_thw": grid, "pixel_values_videos": pixels, "video_grid_thw": grid}


def dummy(config: Any) -> tuple[np.ndarray, MediaInputs]:
    """One image and one video of a token each."""
    start, end = config.vision_start_token_id, config.vision_end_token_id
    tokens = [start, config.image_token_id, end, start, config.video_token_id, end]
    arrays = vision_dummy(config.vision_config)
    arrays["positions"] = np.tile(np.arange(len(tokens), dtype=np.float32), (3, 1))
    return np.array(tokens, np.int32), MediaInputs(contents_key(arrays), arrays)


QWEN3_VL = Family(
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    modalities=("image", "video"),
    load="AutoModelForImageTextToText",
    towers={"image": "model.visual", "video": "model.visual"},
    parts={"vision": r"\bvisual\.", "projector": r"\bvisual\.(merger|deepstack_merger_list)\."},
    placeholders={"image": "image_token_id", "video": "video_token_id"},
    positions=positions,
    sound_tokens=None,
    dummy=dummy,
)
