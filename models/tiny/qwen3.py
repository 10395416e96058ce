"""A small Qwen3 with seeded random weights, as a Hugging Face folder; with experts where asked for. What examples and tests
train from scratch.

Owns the sizes. Anything that loads a Qwen3 loads this one: AutoTokenizer, AutoModelForCausalLM, SGLang.

    build(Path("model"), hidden_size=128, num_layers=2)      # 0.33 million parameters, well under a second
    build(Path("model"), num_experts=4)                      # Qwen3-MoE
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rondo.models.tiny.media import check_heads, experts_config
from rondo.models.tiny.tokenizer import build_tokenizer


def build(
    folder: Path,
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int | None = None,
    num_experts: int = 0,
    experts_per_token: int = 2,
    moe_intermediate_size: int = 64,
    max_positions: int = 2048,
    tie_embeddings: bool = True,
    chat_template: bool = True,
    words: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """Write config.json, tokenizer and float32 model.safetensors into `folder`. Equal arguments write equal weights.

    `intermediate_size` is twice `hidden_size` unless given; `num_experts` 0 is a dense model; `words` as in
    `build_tokenizer`. Raises ConfigError for sizes that do not divide.
    """
    check_heads(hidden_size, num_heads, num_kv_heads)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = build_tokenizer(chat_template=chat_template, words=words)
    experts = {}
    if num_experts:
        experts = experts_config(num_experts, experts_per_token, moe_intermediate_size) | {"norm_topk_prob": True}
    config = (Qwen3MoeConfig if num_experts else Qwen3Config)(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (Qwen3MoeForCausalLM if num_experts else Qwen3ForCausalLM)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
