"""A small model of the same family and settings as another, with random weights: for what must be known before any weights are.

Owns how a config is made small: few layers, of each kind that it has, few heads and experts, windows of 8 tokens. It keeps all
else: kinds of layers, biases, norms, rotations, scales, caps. So it computes like the large one, in a second.

    small = stand_in(config)        # None where no small one can be built
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rondo.models.families import family_of

NUM_LAYERS, WINDOW = 4, 8
_MOST_PARAMETERS = 10_000_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_NAMES = {
    128: "max_position_embeddings n_positions max_seq_len",
    256: "vocab_size vocab_size_per_layer_input",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_ff",
    64: "hidden_size d_model n_embd embed_dim lru_width word_embed_proj_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size image_size",
    24: "q_lora_rank",
    16: "head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim kv_lora_rank qk_head_dim",
    12: "v_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input mamba_n_heads mamba_num_heads mamba_d_state "
    "state_size ssm_state_size patch_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads",
    2: "num_key_value_heads num_kv_heads linear_num_key_heads num_experts_per_tok num_experts_per_token moe_k top_k mamba_expand "
    "depth",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups first_k_dense_replace",
}
_WINDOWS = ("sliding_window", "attention_window", "window_size", "attention_chunk_size")
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()} | dict.fromkeys(_WINDOWS, WINDOW)


def stand_in(config: Any, attn: str | None = None) -> Any:
    """Its model in float32 on the CPU, in evaluation mode. None for a family with media, and where transformers builds none of
    such a config."""
    if family_of(config) is not None:
        return None
    try:
        shrunk = small(config)
        with torch.device("meta"):
            if AutoModelForCausalLM.from_config(copy.deepcopy(shrunk)).num_parameters() > _MOST_PARAMETERS:
                return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(shrunk, dtype=torch.float32, attn_implementation=attn)
            spread(model)
    except Exception:  # noqa: BLE001 - a size that this config wants otherwise; the model itself is asked when it is opened
        return None
    return model.eval()


def small(config: Any) -> Any:
    """A config of the same class."""
    given = copy.deepcopy(config.to_dict())
    subs = getattr(type(config), "sub_configs", None) or {}
    kept = {name: small(getattr(config, name)).to_dict() for name in subs if getattr(config, name, None) is not None}
    return type(config).from_dict(_small(given) | kept)


def _small(given: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {name: size for name, size in _SIZES.items() if type(given.get(name)) is int}
    if "qk_rope_head_dim" in sizes:  # where heads have a part without rotations, this is the part with them
        sizes |= {"head_dim": 8} if "head_dim" in given else {}
        sizes |= {"num_key_value_heads": 4} if "num_key_value_heads" in sizes else {}
    layers = next((name for name in _LAYERS if type(given.get(name)) is int), None)
    for name, value in given.items():
        if isinstance(value, list) and layers is not None and len(value) == given[layers]:
            first = list({str(kind): index for index, kind in reversed(list(enumerate(value)))}.values())
            sizes[name] = [value[sorted(first)[n % len(first)]] for n in range(NUM_LAYERS)]
        elif name.endswith("token_id") and type(value) is int and value >= _SIZES["vocab_size"]:
            sizes[name] = 0
    head = sizes.get("qk_rope_head_dim") or sizes.get("head_dim") or 16
    found = given | sizes | {name: NUM_LAYERS for name in _LAYERS if type(given.get(name)) is int}
    for each in (found.get("rope_parameters"), *(found.get("rope_parameters") or {}).values()):
        if isinstance(each, dict):
            half = int(head * each.get("partial_rotary_factor", given.get("partial_rotary_factor") or 1.0)) // 2
            each |= {name: each[name][:half] for name in ("long_factor", "short_factor") if name in each}
    return found


def spread(model: Any) -> None:
    """Weights so large that attention, positions and experts decide the log-probs; a mistake in any of them is seen."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction" in name:
                tensor.normal_(0, 0.3)
            elif isinstance(tensor, torch.nn.Parameter) and tensor.ndim >= 2:
                tensor.normal_(0, 0.15 if "embed" in name or "wte" in name else 1.5 / tensor.shape[-1] ** 0.5)
            elif isinstance(tensor, torch.nn.Parameter):
                tensor.uniform_(-0.1, 0.1) if "bias" in name else tensor.uniform_(0.5, 1.5)
