"""A small Qwen3.5 with seeded random weights: text, image and video in, text out; three layers in four have linear attention.

build(Path("model"))                      # 0.4 million parameters
build(Path("model"), num_experts=4)       # Qwen3.5-MoE
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.models.tiny import media
from rondo.models.tiny.tokenizer import build_tokenizer


def build(folder: Path, *, words: Sequence[str] = (), **sizes: Any) -> None:
    """Write config.json, tokenizer, processor files and float32 model.safetensors. Equal sizes (`media.Sizes`; 4 layers, of 2
    heads) write equal weights. `words` as in `build_tokenizer`. Raises ConfigError for sizes that do not divide."""
    tokenizer, chosen = (
        build_tokenizer(words=words),
        media.Sizes(**{"num_layers": 4, "num_heads": 2, "num_kv_heads": 1, **sizes}),
    )
    text = chosen.text(len(tokenizer)) | {
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip
    text["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    if experts := chosen.experts():
        del text["intermediate_size"], experts["decoder_sparse_step"], experts["mlp_only_layers"]
        text |= {**experts, "shared_expert_intermediate_size": chosen.moe_intermediate_size}
    media.write(folder, "Qwen3_5Moe" if experts else "Qwen3_5", text, tokenizer, chosen, {})
