"""The Hugging Face folder that a server was started from: which tensors an update must bring, and what they were at the start.

Owns reading it. Nothing is loaded before it is asked for; tensors come one by one, out of the files' own pages.

    folder = ModelFolder.of("Qwen/Qwen3-0.6B")        # or a path
    folder.check(tensors)                             # ConfigError, before anything is sent
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open

from rondo.runtime.errors import ConfigError

_FIXED_DEEPSTACK = ("qwen3_omni_moe", "qwen3_vl_moe")
_NUM_DEEPSTACK = 3
_NEVER_TIED = "qwen3_moe"


@dataclass(frozen=True)
class ModelFolder(Mapping[str, torch.Tensor]):
    """Its tensors under their disk names; `shapes` of all of them, `files` where each lies, and its `config.json`."""

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]

    @classmethod
    def of(cls, model_path: str) -> ModelFolder:
        """Raises ConfigError for a folder without safetensors files."""
        path = _local(model_path)
        shapes: dict[str, tuple[int, ...]] = {}
        files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                    shapes[name], files[name] = tuple(opened.get_slice(name).get_shape()), file
        if not shapes:
            raise ConfigError(
                f"model.path must hold safetensors files for SGLang, got none in {path}. Convert it first"
            )
        return cls(path, orjson.loads((path / "config.json").read_bytes()), shapes, files)

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def setting(self, name: str) -> Any:
        """A setting of the text model, None where the config has none; those of omni models lie deeper."""
        found: Mapping[str, Any] = self.config
        while name not in found:
            inner = next((found[key] for key in ("text_config", "thinker_config", "llm_config") if key in found), None)
            if inner is None:
                return None
            found = inner
        return found[name]

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigError unless these are tensors of this model, and all that belong to what they are part of.

        A whole part of the model may be left out (the talker of an omni model), and weights that are tied to others.
        """
        for name, tensor in tensors.items():
            if name not in self.shapes and not self._tied(name):
                raise ConfigError(f"weights must have the names of {self.path.name}, got {name!r}, which it has not.")
            if name in self.shapes and tuple(tensor.shape) != self.shapes[name]:
                raise ConfigError(
                    f"tensor {name} must have shape {list(self.shapes[name])}, got {list(tensor.shape)}. "
                    "Publish the model that the server was started with"
                )
        parts = {name.partition(".")[0] for name in tensors} | {"lm_head"}
        missing = [name for name in self.shapes if name not in tensors and name.partition(".")[0] in parts]
        missing = [name for name in missing if not self._tied(name)]
        if missing or not tensors:
            raise ConfigError(
                f"weights must be all of {self.path.name}, got {len(missing) or 'all'} missing ({', '.join(missing[:3])}). "
                "A server with a part of a version would serve none"
            )

    def _tied(self, name: str) -> bool:
        return name.endswith("lm_head.weight") and bool(self.setting("tie_word_embeddings"))


def check_served(model_path: str) -> None:
    """Raises ConfigError for a folder that SGLang does not serve, or only until the first image comes, or with other weights."""
    path = _local(model_path)
    config = orjson.loads((path / "config.json").read_bytes())
    kind = config.get("model_type")
    if kind == "qwen3_omni_moe_thinker":
        raise ConfigError(
            f"model.path must be a whole Qwen3-Omni for SGLang, which serves no thinker alone, got {path.name}. Name the folder "
            "that it was published as (of the tiny one: build_args with whole=True, num_deepstack=3)"
        )
    if kind == _NEVER_TIED and config.get("tie_word_embeddings"):
        raise ConfigError(
            f"the output layer of {path.name} must have weights of its own for SGLang, which ties none of a {kind} to the "
            "embeddings and samples with random ones, got tie_word_embeddings. Generate with the embedded engine (of the tiny "
            "one: build_args with tie_embeddings=False)"
        )
    seen = config.get("thinker_config", config).get("vision_config", {}).get("deepstack_visual_indexes")
    if kind in _FIXED_DEEPSTACK and seen is not None and len(seen) != _NUM_DEEPSTACK:
        raise ConfigError(
            f"vision_config.deepstack_visual_indexes of {path.name} must name {_NUM_DEEPSTACK} layers for SGLang, which counts "
            f"on so many, got {len(seen)}. Generate with the embedded engine"
        )


def _local(model_path: str) -> Path:
    path = Path(model_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_path, local_files_only=True))
