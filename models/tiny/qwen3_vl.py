"""A small Qwen3-VL with seeded random weights: text, image and video in, text out; with experts where asked for.

build(Path("model"))                      # 0.3 million parameters; an image of 32 x 32 pixels takes 4 tokens
build(Path("model"), num_experts=4)       # Qwen3-VL-MoE
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.models.tiny import media
from rondo.models.tiny.tokenizer import build_tokenizer


def build(folder: Path, *, words: Sequence[str] = (), **sizes: Any) -> None:
    """Write config.json, tokenizer, processor files and float32 model.safetensors. Equal sizes (`media.Sizes`) write equal
    weights. `words` as in `build_tokenizer`. Raises ConfigError for sizes that do not divide."""
    tokenizer, chosen = build_tokenizer(words=words), media.Sizes(**sizes)
    text = {**chosen.text(len(tokenizer)), **chosen.experts()}
    name = "Qwen3VLMoe" if chosen.num_experts else "Qwen3VL"
    media.write(folder, name, text, tokenizer, chosen, {"deepstack_visual_indexes": [0]})
