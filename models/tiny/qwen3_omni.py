"""A small thinker of Qwen3-Omni with seeded random weights: text, image, audio and video in, text out.

Owns the sizes. The folder is that of a thinker alone, as transformers saves it; or, for servers that know no other, that of a
whole Qwen3-Omni without its talker.

    build(Path("model"))        # half a million parameters; an image of 32 x 32 pixels takes 4 tokens, a second of sound 13
"""

from __future__ import annotations

from pathlib import Path

from rondo.models.tiny import media
from rondo.models.tiny.tokenizer import build_tokenizer


def build(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_experts: int = 4,
    experts_per_token: int = 2,
    moe_intermediate_size: int = 64,
    vision_size: int = 64,
    vision_layers: int = 2,
    num_deepstack: int = 1,
    patch_size: int = 8,
    audio_size: int = 64,
    audio_layers: int = 1,
    mel_bins: int = 128,
    max_positions: int = 4096,
    tie_embeddings: bool = True,
    whole: bool = False,
    seed: int = 0,
) -> None:
    """Write config.json, tokenizer, processor files and float32 model.safetensors. Equal arguments write equal weights.

    The first `num_deepstack` vision layers are also seen by the decoder's first ones. `whole`: the thinker as part of a model
    that also speaks. SGLang serves that form alone, and with 3 such layers, as in the published model. Raises ConfigError for
    sizes that do not divide.
    """
    tokenizer = build_tokenizer(omni=True)
    text = media.text_config(
        len(tokenizer), hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
        max_positions=max_positions,
    )  # fmt: skip
    experts = media.experts_config(num_experts, experts_per_token, moe_intermediate_size)
    vision = media.vision_config(
        hidden_size=vision_size, depth=vision_layers, patch_size=patch_size, out_hidden_size=hidden_size
    )
    audio = {
        "num_mel_bins": mel_bins, "encoder_layers": audio_layers, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * audio_size, "d_model": audio_size, "output_dim": hidden_size,
        "downsample_hidden_size": max(8, audio_size // 4), "n_window": 50, "n_window_infer": 100,
    }  # fmt: skip
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3OmniMoeThinkerConfig(
        text_config={**text, **experts, "norm_topk_prob": True, "tie_word_embeddings": tie_embeddings},
        vision_config={**vision, "deepstack_visual_indexes": list(range(num_deepstack))},
        audio_config=audio,
        audio_token_id=ids("<|audio_pad|>"),
        audio_start_token_id=ids("<|audio_start|>"),
        tie_word_embeddings=tie_embeddings,
        **media.token_ids(tokenizer),
    )
    kind = Qwen3OmniMoeThinkerForConditionalGeneration
    media.write(folder, kind, config, tokenizer, patch_size=patch_size, seed=seed)
    if whole:
        _make_whole(folder)


def _make_whole(folder: Path) -> None:
    """The same weights under the names, and with the config, that the thinker has in a whole Qwen3-Omni."""
    import orjson
    from safetensors.torch import load_file, save_file

    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    thinker = orjson.loads(config.read_bytes())
    save_file({f"thinker.{name}": tensor for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    told = {
        "model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "enable_audio_output": False, "thinker_config": thinker,
    }  # fmt: skip
    config.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))
