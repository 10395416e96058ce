"""What the tiny models share: sizes and their checks, configs of their parts, processor files, and writing the folder.

Owns the sizes that are not worth a setting, and the files by which transformers' processors and ours read them. Does not own
a family (`qwen3_vl.py` and its like).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.errors import ConfigError

_GRID = 8
"""Patches on a side of the learned position embeddings; other sizes are interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a multimodal model: decoder, experts (0: a dense model), vision tower. ConfigError for sizes that do not divide."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 0
    experts_per_token: int = 2
    moe_intermediate_size: int = 64
    vision_size: int = 64
    vision_layers: int = 2
    patch_size: int = 8
    max_positions: int = 4096
    tie_embeddings: bool = True
    init_std: float = 0.02
    """Of the weights, the library's; with 0.08 these narrow layers learn to see in a third of the steps."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_heads, self.num_kv_heads)

    def text(self, vocab_size: int) -> dict[str, Any]:
        """Config of the decoder, with rotary positions on three axes."""
        half = self.hidden_size // self.num_heads // 2
        side = half // 3
        return {
            "vocab_size": vocab_size, "hidden_size": self.hidden_size, "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.hidden_size // self.num_heads,
            "max_position_embeddings": self.max_positions, "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": self.init_std,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * side, side, side],
                "mrope_interleaved": True,
            },
        }  # fmt: skip

    def experts(self) -> dict[str, Any]:
        """Config of the experts, none for a dense model."""
        if not self.num_experts:
            return {}
        return experts_config(self.num_experts, self.experts_per_token, self.moe_intermediate_size)

    def vision(self) -> dict[str, Any]:
        """Config of the vision tower: patches of `patch_size` pixels and two frames, four of which make a token."""
        return {
            "depth": self.vision_layers, "hidden_size": self.vision_size, "intermediate_size": 2 * self.vision_size,
            "num_heads": 4, "patch_size": self.patch_size, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": self.hidden_size, "num_position_embeddings": _GRID**2,
            "initializer_range": self.init_std,
        }  # fmt: skip


def check_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    """ConfigError for sizes that do not divide."""
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ConfigError(
            f"hidden_size must be an even multiple of num_heads, got {hidden_size} and {num_heads}. Change model.build_args"
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}. Change model.build_args"
        )


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


def write(
    folder: Path, name: str, text: dict[str, Any], tokenizer: Any, sizes: Sizes, vision: dict[str, Any], **other: Any
) -> None:
    """transformers' model `name` with seeded random float32 weights, its tokenizer, and its processor's files."""
    import torch
    import transformers

    ids = tokenizer.convert_tokens_to_ids
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={**sizes.vision(), **vision},
        tie_word_embeddings=sizes.tie_embeddings,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        **other,
    )
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
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
        "patch_size": sizes.patch_size, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": (2 * sizes.patch_size) ** 2, "longest_edge": (2 * sizes.patch_size) ** 2 * 1024},
        "processor_class": "Qwen3OmniMoeProcessor" if omni else "Qwen3VLProcessor",
    }  # fmt: skip
    sound: dict[str, Any] = {}
    if omni:
        sound = transformers.WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins).to_dict()
    _dump(folder / "preprocessor_config.json", {**sound, **shared, "image_processor_type": "Qwen2VLImageProcessorFast"})
    video = "Qwen2VLVideoProcessor" if omni else "Qwen3VLVideoProcessor"
    _dump(folder / "video_preprocessor_config.json", {**shared, "video_processor_type": video})


def _dump(path: Path, values: dict[str, Any]) -> None:
    path.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))
