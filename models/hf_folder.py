"""A Hugging Face folder: weights in files, config, tokenizer, processor files; what transformers loads by its auto classes, a
model with a value head as one for sequence classification. And the folder of an adapter, which peft loads beside its base.

Owns their layout. Does not own where the weights come from: a model that trains, or the shards of a checkpoint (`checkpoint.py`).

Invariant: one file's tensors are in memory at a time.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from transformers.utils import cached_file

from rondo.models.families import family_of
from rondo.models.load import load_tokenizer
from rondo.models.lora import config_of, for_peft, published_adapter
from rondo.models.value_head import config_of_scores, value_head_of

MAX_FILE_BYTES = 4 << 30
_PROCESSOR_FILES = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json",
)  # fmt: skip


def write_folder(
    folder: Path, model: Any, tokenizer_path: str, dtype: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """`tensors` (name on disk, whole) of `model`, which may be without memory, and what belongs to them."""
    folder.mkdir(parents=True)
    files: list[tuple[Path, dict[str, int]]] = []
    for file in _files(tensors):
        path = folder / f"part-{len(files)}.safetensors"
        save_file(file, path, metadata={"format": "pt"})
        files.append((path, {name: tensor.nbytes for name, tensor in file.items()}))
    places: dict[str, str] = {}
    total = 0
    for number, (path, sizes) in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        path.rename(folder / name)
        places |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))
    scores, tokenizer = value_head_of(model) is not None, load_tokenizer(tokenizer_path)
    config = config_of_scores(model.config, tokenizer) if scores else copy.deepcopy(model.config)
    config.dtype = getattr(torch, dtype)
    # FSDP2 puts its own class, named so, in front of the model's.
    config.architectures = config.architectures or [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate() and not scores:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The files as they are: training changes none of them, and without torchvision transformers could not write them again.
    for file_name in _PROCESSOR_FILES if family_of(model) is not None else ():
        # Of a model on the hub, those that exist are in the cache since its processor was made: no network is needed.
        unasked = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        if (found := cached_file(tokenizer_path, file_name, **unasked)) is not None:
            shutil.copyfile(found, folder / file_name)


def write_adapter(
    folder: Path, model: Any, base: str, dtype: str, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapter of `model` in `dtype`, with the name of its base, or the absolute path of a folder, so that peft finds it
    from anywhere; and the tokenizer. tensors: None for its own (published names)."""
    folder.mkdir(parents=True)
    found = for_peft(published_adapter(model) if tensors is None else tensors)
    told = {name: tensor.to("cpu", getattr(torch, dtype)).contiguous() for name, tensor in found.items()}
    save_file(told, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    found_from_anywhere = str(Path(base).resolve()) if Path(base).is_dir() else base
    (folder / "adapter_config.json").write_bytes(
        orjson.dumps(config_of(model, found_from_anywhere), option=orjson.OPT_INDENT_2)
    )
    load_tokenizer(base).save_pretrained(folder)


def _files(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Copies on the CPU, as many as fit into a file."""
    file: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if file and size + tensor.nbytes > MAX_FILE_BYTES:
            yield file
            file, size = {}, 0
        file[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        size += tensor.nbytes
    yield file
