"""Folders of the published models without their weights: the real shapes in config.json, and the tokenizer and processor files of
the tiny models; and rows for them."""

from __future__ import annotations

import functools
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

_ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_QWEN3_4B = {**_QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
_QWEN3_32B = {
    **_QWEN3_8B, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
}  # fmt: skip
_QWEN3_30B_A3B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
_QWEN3_235B_A22B = {
    **_QWEN3_30B_A3B, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64,
}  # fmt: skip
_VISION = {
    "in_channels": 3, "num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip


def qwen3_8b(folder: Path) -> Path:
    """Qwen/Qwen3-8B"""
    return _qwen3(folder, _QWEN3_8B)


def qwen3_4b(folder: Path) -> Path:
    """Qwen/Qwen3-4B"""
    return _qwen3(folder, _QWEN3_4B)


def qwen3_32b(folder: Path) -> Path:
    """Qwen/Qwen3-32B"""
    return _qwen3(folder, _QWEN3_32B)


def qwen3_30b_a3b(folder: Path) -> Path:
    """Qwen/Qwen3-30B-A3B"""
    return _qwen3(folder, _QWEN3_30B_A3B)


def qwen3_235b_a22b(folder: Path) -> Path:
    """Qwen/Qwen3-235B-A22B"""
    return _qwen3(folder, _QWEN3_235B_A22B)


def _qwen3(folder: Path, sizes: dict[str, Any]) -> Path:
    from rondo.models.tiny.tokenizer import build_tokenizer

    folder.mkdir()
    build_tokenizer().save_pretrained(folder)
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    config = {
        "model_type": "qwen3_moe" if "num_experts" in sizes else "qwen3",
        **sizes,
        "max_position_embeddings": 40960,
        "rope_parameters": rope,
    }
    _write(folder, {"tie_word_embeddings": False, **config})
    return folder


def qwen3_vl_8b(folder: Path) -> Path:
    """Qwen/Qwen3-VL-8B-Instruct"""
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
    return _qwen3_vl(folder, {**_QWEN3_8B, "tie_word_embeddings": False}, vision)


def qwen3_vl_4b(folder: Path) -> Path:
    """Qwen/Qwen3-VL-4B-Instruct"""
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    return _qwen3_vl(folder, _QWEN3_4B, vision)


def _qwen3_vl(folder: Path, sizes: dict[str, Any], vision: dict[str, Any]) -> Path:
    from rondo.models.tiny import qwen3_vl

    tiny = _tiny(qwen3_vl.build, folder)
    rope = {**_ROPE, "rope_theta": 5000000.0}
    text = {"model_type": "qwen3_vl_text", **sizes, "max_position_embeddings": 262144, "rope_parameters": rope}
    tower = {"model_type": "qwen3_vl", **_VISION, **vision, "out_hidden_size": sizes["hidden_size"]}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower, **_token_ids(tiny)}
    _write(folder, {**config, "tie_word_embeddings": sizes["tie_word_embeddings"]})
    return folder


def qwen3_vl_30b_a3b(folder: Path) -> Path:
    """Qwen/Qwen3-VL-30B-A3B-Instruct"""
    from rondo.models.tiny import qwen3_vl

    tiny = _tiny(functools.partial(qwen3_vl.build, num_experts=4), folder)
    rope = {**_ROPE, "rope_theta": 5000000.0}
    text = {
        "model_type": "qwen3_vl_moe_text",
        **_QWEN3_30B_A3B,
        "max_position_embeddings": 262144,
        "rope_parameters": rope,
    }
    vision = {
        "model_type": "qwen3_vl_moe", **_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
        "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    config = {
        "model_type": "qwen3_vl_moe",
        "text_config": {**text, "tie_word_embeddings": False},
        "vision_config": vision,
    }
    _write(folder, {**config, **_token_ids(tiny), "tie_word_embeddings": False})
    return folder


def qwen3_omni_30b(folder: Path) -> Path:
    """Qwen/Qwen3-Omni-30B-A3B-Instruct, thinker and talker"""
    from rondo.models.tiny import qwen3_omni

    tiny = _tiny(qwen3_omni.build, folder)
    text = {
        "model_type": "qwen3_omni_moe_text", "hidden_size": 2048, "intermediate_size": 768, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 152064, "max_position_embeddings": 65536,
        "rope_parameters": {**_ROPE, "rope_theta": 1000000.0}, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_omni_moe_vision_encoder", **_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
        "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    audio = {
        "model_type": "qwen3_omni_moe_audio_encoder", "num_mel_bins": 128, "encoder_layers": 32, "d_model": 1280,
        "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "output_dim": 2048, "downsample_hidden_size": 480,
        "n_window": 50, "n_window_infer": 800,
    }  # fmt: skip
    thinker = {
        "model_type": "qwen3_omni_moe_thinker", "text_config": text, "vision_config": vision, "audio_config": audio,
        "position_id_per_seconds": 13, **_token_ids(tiny),
    }  # fmt: skip
    _write(folder, {"model_type": "qwen3_omni_moe", "thinker_config": thinker})
    return folder


def rows(folder: Path, kind: str, num_rows: int) -> Path:
    """A JSON Lines file of `kind` "text", "image" or "omni", with its media beside it."""
    from PIL import Image

    Image.fromarray(np.full((64, 96, 3), 128, np.uint8)).save(folder / "picture.png")
    (folder / "sound.wav").write_bytes(_sound(np.arange(8000)))
    made: list[dict[str, Any]] = []
    for number in range(num_rows):
        row: dict[str, Any] = {"question": f"{number} + 1?", "answer": f"It is {number + 1}"}
        if kind == "image":
            row["image"] = "picture.png"
        if kind == "omni":
            text, picture = {"type": "text", "text": "?"}, {"type": "image", "image": "picture.png"}
            sound = {"type": "audio", "audio": "sound.wav"}
            frames = {"type": "video", "video": ["picture.png"] * 4}
            row["messages"] = [{"role": "user", "content": [(picture, sound, frames)[number % 3], text]}]
        made.append(row)
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def _tiny(build: Any, folder: Path) -> dict[str, Any]:
    """The tiny model's folder with patches of the real size, without weights; its config."""
    folder.mkdir()
    build(folder, patch_size=16)
    (folder / "model.safetensors").unlink()
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _token_ids(config: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in config.items() if name.endswith("_token_id") and isinstance(value, int)}


def _write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def _sound(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16000)
        written.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()
