"""A small Qwen3-VL with seeded random weights: text, image and video in, text out; with experts where asked for.

build(Path("model"))                      # 0.3 million parameters; an image of 32 x 32 pixels takes 4 tokens
build(Path("model"), num_experts=4)       # Qwen3-VL-MoE
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rondo.models.tiny import media
from rondo.models.tiny.tokenizer import build_tokenizer


def build(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_experts: int = 0,
    experts_per_token: int = 2,
    moe_intermediate_size: int = 64,
    vision_size: int = 64,
    vision_layers: int = 2,
    patch_size: int = 8,
    max_positions: int = 4096,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> None:
    """Write config.json, tokenizer, processor files and float32 model.safetensors. Equal arguments write equal weights.

    `num_experts` 0 is a dense model. Raises ConfigError for sizes that do not divide.
    """
    tokenizer = build_tokenizer()
    text: dict[str, Any] = media.text_config(
        len(tokenizer), hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
        max_positions=max_positions,
    )  # fmt: skip
    if num_experts:
        text |= media.experts_config(num_experts, experts_per_token, moe_intermediate_size)
    vision = media.vision_config(
        hidden_size=vision_size, depth=vision_layers, patch_size=patch_size, out_hidden_size=hidden_size
    )
    import transformers

    name = "Qwen3VLMoe" if num_experts else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "tie_word_embeddings": tie_embeddings},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=tie_embeddings,
        **media.token_ids(tokenizer),
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    media.write(folder, kind, config, tokenizer, patch_size=patch_size, seed=seed)
