"""A small thinker of Qwen3-Omni with seeded random weights: text, image, audio and video in, text out.

Owns the sizes. The folder is that of a thinker alone, as transformers saves it; or, for servers that know no other, that of a
whole Qwen3-Omni without its talker.

    build(Path("model"))        # half a million parameters; an image of 32 x 32 pixels takes 4 tokens, a second of sound 13
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.models.tiny import media
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.runtime.errors import ConfigError


def build(
    folder: Path,
    *,
    num_deepstack: int = 1,
    audio_size: int = 64,
    audio_layers: int = 1,
    mel_bins: int = 128,
    whole: bool = False,
    words: Sequence[str] = (),
    **sizes: Any,
) -> None:
    """Write config.json, tokenizer, processor files and float32 model.safetensors. Equal arguments write equal weights; the other
    sizes are those of `media.Sizes`, with 4 experts.

    The first `num_deepstack` vision layers are also seen by the decoder's first ones. `whole`: the thinker as part of a model
    that also speaks. SGLang serves that form alone, and with 3 such layers, as in the published model. `words` as in
    `build_tokenizer`. Raises ConfigError for sizes that do not divide.
    """
    tokenizer, chosen = build_tokenizer(omni=True, words=words), media.Sizes(**{"num_experts": 4, **sizes})
    if not chosen.num_experts:
        raise ConfigError("num_experts must be at least 1, as every Qwen3-Omni has, got 0. Change model.build_args")
    text = {**chosen.text(len(tokenizer)), **chosen.experts(), "norm_topk_prob": True}
    audio = {
        "num_mel_bins": mel_bins, "encoder_layers": audio_layers, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * audio_size, "d_model": audio_size, "output_dim": chosen.hidden_size,
        "downsample_hidden_size": max(8, audio_size // 4), "n_window": 50, "n_window_infer": 100,
    }  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    media.write(
        folder,
        "Qwen3OmniMoeThinker",
        text,
        tokenizer,
        chosen,
        {"deepstack_visual_indexes": list(range(num_deepstack))},
        audio_config=audio,
        audio_token_id=ids("<|audio_pad|>"),
        audio_start_token_id=ids("<|audio_start|>"),
    )
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
