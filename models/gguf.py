"""A GGUF file as a Hugging Face folder: how a model that somebody quantized for a laptop becomes one that trains.

Owns the conversion. Does not own reading of the format, which is transformers' for every family that it knows, with the package
`gguf`. `ModelConfig(path="model.gguf")` names this function as the one that builds the run's model:

    build(Path("runs/sums/model"), "SmolLM2-135M-Instruct.Q4_1.gguf")   # config, weights, tokenizer, chat template

Invariant: the folder holds float32 weights that nothing calls quantized. The whole model is in memory while it is converted, as
nowhere else: files of this kind are of a laptop's size.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.runtime.errors import ConfigError


def build(folder: Path, file: str) -> None:
    """Writes the model of `file` into `folder`. ConfigError for a file that is not there or cannot be read as a model."""
    source = Path(file)
    if not source.is_file():
        raise ConfigError(f"model.path must name a GGUF file that exists, got {file!r}. Check the path")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    missing = [package for package in ("accelerate", "gguf") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"model.path must be a Hugging Face folder without {' and '.join(missing)}, got {file!r}. Install what reads it: "
            "pip install 'rondo-rl[gguf]'"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read, report = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model.path must name a GGUF file of a family that transformers reads, got {file!r} ({error}). "
            "Use the model's Hugging Face folder"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model.path must name a GGUF file with all weights of its model, got {file!r} with {len(missing)} missing "
            f"({', '.join(missing[:3])}). Download it again"
        )
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The class that was read keeps for itself that its weights were quantized, and would not be saved as what it is now.
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
