"""Qwen3-Omni's thinker: text from text, images, audios, videos, and videos with their sound.

The talker, which speaks, is not trained: of a whole Qwen3-Omni folder the thinker is loaded. Positions are in time: a second of
sound or video takes `position_id_per_seconds` of them, so they can be fractions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rondo.models.families.family import Family
from rondo.models.families.qwen3_vl import vision_dummy
from rondo.models.media.inputs import MediaInputs, contents_key

_FRAMES = 8
"""Of sound in the dummy: the fewest that the three strided convolutions make one token of."""


def positions(model: Any, tokens: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    """float32 [3, T] by the model's own rule, which needs no weights. `arrays` also holds what only positions depend on:
    `video_second_per_grid` [videos] and `use_audio_in_video`."""
    import torch

    ids = torch.from_numpy(tokens.astype(np.int64))[None]

    def tensor(name: str) -> Any:
        return torch.from_numpy(np.array(arrays[name])) if name in arrays else None

    sound = tensor("feature_attention_mask")
    mask = torch.ones_like(ids)
    if "image_grid_thw" not in arrays and "video_grid_thw" not in arrays:
        return np.tile(np.arange(len(tokens), dtype=np.float32), (3, 1))
    found, _ = model.model.get_rope_index(
        ids,
        tensor("image_grid_thw"),
        tensor("video_grid_thw"),
        mask,
        bool(arrays.get("use_audio_in_video", False)),
        None if sound is None else sound.sum(1),
        tensor("video_second_per_grid"),
    )
    return np.asarray(found[:, 0], dtype=np.float32)


def sound_tokens(config: Any, lengths: np.ndarray) -> np.ndarray:
    """Tokens that the audio tower makes of so many frames, int64 [n]: three convolutions of stride 2 in each window."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return np.asarray(_get_feat_extract_output_lengths(lengths.astype(np.int64), config.audio_config.n_window))


def dummy(config: Any) -> tuple[np.ndarray, MediaInputs]:
    """One image, one audio and one video of a token each."""
    mel_bins = config.audio_config.num_mel_bins
    tokens = [config.image_token_id, config.audio_token_id, config.video_token_id]
    arrays = vision_dummy(config.vision_config)
    arrays["input_features"] = np.zeros((1, mel_bins, _FRAMES), np.float32)
    arrays["feature_attention_mask"] = np.ones((1, _FRAMES), np.int32)
    arrays["positions"] = np.tile(np.arange(len(tokens), dtype=np.float32), (3, 1))
    return np.array(tokens, np.int32), MediaInputs(contents_key(arrays), arrays)


QWEN3_OMNI = Family(
    model_types=("qwen3_omni_moe_thinker",),
    modalities=("image", "audio", "video"),
    load="AutoModelForImageTextToText",
    towers={"image": "model.visual", "audio": "model.audio_tower", "video": "model.visual"},
    parts={
        "vision": r"\bvisual\.",
        "audio": r"\baudio_tower\.",
        "projector": r"\bvisual\.(merger|merger_list)\.|\baudio_tower\.(proj1|proj2)\.",
    },
    placeholders={"image": "image_token_id", "audio": "audio_token_id", "video": "video_token_id"},
    positions=positions,
    sound_tokens=sound_tokens,
    dummy=dummy,
)
