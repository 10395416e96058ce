"""`rondo export` of a run that trained adapters: the adapter alone, or the whole model with it merged.

Owns what is read of which: the base from its own folder, the adapter from the shards of a checkpoint. Does not own the two
folders (`hf_folder.py`), nor how they are written so that they are whole or not there (`checkpoint.py`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from rondo.models.checkpoint import export_hf, read_weights, write_adapter_folder
from rondo.models.config import LoraConfig
from rondo.models.load import empty_model, load_model
from rondo.models.lora import adapt, load_published, published_adapter
from rondo.models.names import adapter_tensors
from rondo.models.value_head import give_value_head


def export_adapter(
    folder: Path, out: Path, model_path: str, settings: LoraConfig, *, dtype: str = "float32", scores: bool = False
) -> None:
    """Write the adapter of the checkpoint `folder`, whose base is at `model_path`, as the folder `out` that peft loads. scores:
    it is a reward model's, with its head.

    Raises CorruptData for a checkpoint without its marker, or of another adapter."""
    model = empty_model(model_path)
    if scores:
        give_value_head(model, whole=True)
    adapt(model, settings)
    write_adapter_folder(out, model, model_path, dtype=dtype, tensors=_stored(folder, model))


def export_merged(
    folder: Path, out: Path, model_path: str, settings: LoraConfig, *, dtype: str = "float32", scores: bool = False
) -> None:
    """Write the base at `model_path` with the adapter of the checkpoint `folder` merged into it as the Hugging Face folder `out`:
    in one process, which holds the base in `dtype`. Raises as `export_adapter`, and NoRoom."""
    cut = functools.partial(give_value_head, whole=True) if scores else (lambda _: None)
    model = load_model(model_path, dtype=dtype, cut=cut)
    adapt(model, settings, dtype=torch.float32)
    load_published(model, _stored(folder, model))
    export_hf(out, model, model_path, dtype=dtype)


def _stored(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """Published names, float32."""
    found = {name: torch.empty(tensor.shape) for name, tensor in adapter_tensors(model).items()}
    read_weights(folder, found)
    return dict(zip(published_adapter(model), found.values(), strict=True))
