"""An adapter as a folder that SGLang reads: peft's names and files, and what SGLang takes for granted beside them.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     [out, r]

SGLang computes q, k and v, and gate and up, as one product each. Of an adapter with one of them it wants all, and k alone ends
the server at its first use: so those that are missing are written as zeros. Adapters of encoders it skips, or mistakes for those
of the decoder's layers with the same number; adapters of experts it computes with kernels of a GPU alone: both are refused. In
Qwen3-Omni it looks for the decoder's products in the encoder of sound too, and ends at the first one that it is to hear.

Owns these rules and the files. Does not own which modules have adapters (`models/lora.py`) nor who reads the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson
import torch
from safetensors.torch import save_file

from rondo.models.config import LoraConfig
from rondo.models.lora import PREFIX, adapter_config
from rondo.roles.engines.sglang.weights_disk import whole
from rondo.runtime.errors import ConfigError

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.([^.]+)\.lora_([AB])\.weight")
_ENCODERS = re.compile(r"(^|\.)(visual|audio_tower|vision_tower|multi_modal_projector)\.")
_EXPERTS = re.compile(r"\.experts\.")
_KNOWN = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Modules of a layer that `--lora-target-modules` takes by name; it takes the others with "all" alone."""

_ENDS_AT_SOUND = frozenset({"qwen3_omni_moe", "qwen3_omni_moe_thinker"})
"""Models of which SGLang 0.5.23 does not say which modules adapters are for (`should_apply_lora`), though they hear."""


def check_media(model_type: str) -> None:
    """Raises ConfigError for a model with which a server that has adapters does not take all media."""
    if model_type in _ENDS_AT_SOUND:
        raise ConfigError(
            f"train.lora.publish must be 'merged' for media with SGLang and a model of type {model_type!r}, to whose encoder of "
            "sound it would give the decoder's adapters and end, got 'adapter'. Set it to 'merged'"
        )


def completed(adapter: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """`adapter` with zeros for what SGLang would miss. `shapes`: of the model's own tensors, by their disk names. Raises
    ConfigError for what it has no place for."""
    found = dict(adapter)
    for name, tensor in adapter.items():
        match = _TENSOR.fullmatch(name)
        if match is None or _ENCODERS.search(match[1] + ".") or _EXPERTS.search(name):
            raise ConfigError(
                f"an adapter for SGLang must be of the decoder's layers, without their experts, got {name!r}. Choose others with "
                "train.lora.targets, or set train.lora.publish='merged'"
            )
        at, module, half = match.groups()
        for other in next((group for group in _TOGETHER if module in group), ()):
            missing = f"{PREFIX}{at}.{other}.lora_{half}.weight"
            if missing not in found:
                outputs = tensor.shape[0] if half == "A" else _outputs(f"{at}.{other}.weight", shapes)
                found[missing] = tensor.new_zeros(outputs, tensor.shape[1])
    return found


def _outputs(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of a weight; on disk the parts of an omni model have a longer name than in the trainer's memory."""
    found = next((shape for known, shape in shapes.items() if f".{known}".endswith(f".{name}")), None)
    if found is None:
        raise ConfigError(
            f"an adapter for SGLang must be of q, k and v together, and of gate and up, where the model's folder has no {name}, "
            "got one of a part of them. Name all in train.lora.targets, or set train.lora.publish='merged'"
        )
    return found[0]


def write(folder: Path, adapter: Mapping[str, torch.Tensor], lora: LoraConfig) -> None:
    """The whole folder or none; one that is there is replaced."""
    with whole(folder) as aside:
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in adapter.items()}
        save_file(tensors, aside / "adapter_model.safetensors", {"format": "pt"})
        (aside / "adapter_config.json").write_bytes(orjson.dumps(adapter_config(adapter, lora, "")))


def target_modules(lora: LoraConfig, names: Iterable[str]) -> list[str]:
    """`--lora-target-modules` of a server for the adapters of such settings; `names` are those of the model's tensors on disk."""
    targets = ("language",) if lora.targets == "all-linear" else lora.targets
    linear = re.compile(r"(?:.*\.)?layers\.\d+\.(?:.*\.)?([^.]+)\.weight")
    found = {
        match[1]
        for name in names
        if (match := linear.fullmatch(name))
        and not _ENCODERS.search(name)
        and ".experts." not in name
        and any(each == "language" or f".{name}".endswith(f".{each}.weight") for each in targets)
    }
    together = {other for group in _TOGETHER if found & set(group) for other in group}
    found = {name for name in found | together if name.endswith(("_proj", "proj_qkv", "proj_z", "proj_a", "proj_b"))}
    return sorted(found) if found <= _KNOWN else ["all"]
