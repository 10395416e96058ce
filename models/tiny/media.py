"""What the tiny multimodal models share: configs of their parts, processor files, and writing the folder.

Owns the sizes that are not worth a setting, and the files by which transformers' processors and ours read them. Does not own
a family (`qwen3_vl.py` and its like).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from rondo.models.tiny.qwen3 import check_heads
from rondo.runtime.errors import ConfigError

_GRID = 8
"""Patches on a side of the learned position embeddings; other sizes are interpolated."""


def text_config(
    vocab_size: int, *, hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, max_positions: int
) -> dict[str, Any]:
    """Of the decoder, with rotary positions on three axes."""
    check_heads(hidden_size, num_heads, num_kv_heads)
    half = hidden_size // num_heads // 2
    side = half // 3
    return {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads, "max_position_embeddings": max_positions,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * side, side, side],
            "mrope_interleaved": True,
        },
    }  # fmt: skip


def experts_config(num_experts: int, experts_per_token: int, moe_intermediate_size: int) -> dict[str, Any]:
    if not 1 <= experts_per_token <= num_experts:
        raise ConfigError(
            f"experts_per_token must be from 1 to num_experts, got {experts_per_token} of {num_experts}. "
            "Change model.build_args"
        )
    return {
        "num_experts": num_experts, "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": moe_intermediate_size, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def vision_config(*, hidden_size: int, depth: int, patch_size: int, out_hidden_size: int) -> dict[str, Any]:
    """Of the vision tower: patches of `patch_size` pixels and two frames, four of which make a token."""
    return {
        "depth": depth, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_heads": 4,
        "patch_size": patch_size, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": out_hidden_size,
        "num_position_embeddings": _GRID**2,
    }  # fmt: skip


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Names in a config -> ids of the media tokens."""
    ids = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"), "vision_end_token_id": ids("<|vision_end|>"),
    }  # fmt: skip


def write(folder: Path, kind: Any, config: Any, tokenizer: Any, *, patch_size: int, seed: int) -> None:
    """The model of class `kind` with seeded random float32 weights, its tokenizer, and its processor's files."""
    import torch

    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        if hasattr(config, "audio_config"):
            # The library's 0.02 for every weight suits wide layers: through these narrow ones sound would arrive a thousand times
            # smaller than its positions, and nothing learns to hear it.
            tower = model.model.audio_tower
            for layer in (tower.conv2d1, tower.conv2d2, tower.conv2d3, tower.conv_out):
                torch.nn.init.kaiming_normal_(layer.weight)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    omni = hasattr(config, "audio_config")
    shared = {
        "patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": (2 * patch_size) ** 2, "longest_edge": (2 * patch_size) ** 2 * 1024},
        "processor_class": "Qwen3OmniMoeProcessor" if omni else "Qwen3VLProcessor",
    }  # fmt: skip
    sound = _sound(config.audio_config.num_mel_bins) if omni else {}
    _dump(folder / "preprocessor_config.json", {**sound, **shared, "image_processor_type": "Qwen2VLImageProcessorFast"})
    video = "Qwen2VLVideoProcessor" if omni else "Qwen3VLVideoProcessor"
    _dump(folder / "video_preprocessor_config.json", {**shared, "video_processor_type": video})


def _sound(mel_bins: int) -> dict[str, Any]:
    from transformers import WhisperFeatureExtractor

    return dict(WhisperFeatureExtractor(feature_size=mel_bins).to_dict())


def _dump(path: Path, values: dict[str, Any]) -> None:
    path.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))
