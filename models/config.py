"""Settings of the model: where its Hugging Face folder comes from, in which precision it is served, on which ranks it trains, and
its adapters.

Owns the choice between an existing folder and one that is built, the shape of a mesh, and which adapters are trained. Does not
own the model's shape (its config.json does) nor how it is trained (`roles/config/`). Imports no torch.

    ModelConfig(path="Qwen/Qwen3-0.6B")
    ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"num_layers": 2})
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from rondo.runtime.errors import ConfigError
from rondo.runtime.section import FunctionRef, Section, fixed

Dtype = Literal["auto", "float32", "bfloat16"]
Attn = Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]
ALL_LINEAR = "all-linear"
GGUF = "rondo.models.gguf:build"
"""What writes the folder of a `model.path` that ends so."""


_OF_MODEL = fixed("its checkpoint holds the tensors of that model")


class MeshConfig(Section):
    """How the ranks that train lie beside each other (`models/mesh.py`)."""

    dp_replicate: int = Field(1, ge=1)
    """Copies of the model. Copies on nodes of their own sum gradients once an update, where shards of one copy over all nodes are
    gathered with every micro-batch; each takes a whole copy's memory."""
    dp_shard: int | None = Field(None, ge=1)
    """Ranks that one copy is cut over; None: all that there are."""
    ep: int = Field(1, ge=1)
    """Of a mixture of experts: over how many neighbouring ranks of a copy the experts of a layer are shared out. Tokens come to
    them, where with 1 all experts of a layer are gathered on every rank with every micro-batch."""

    def shape(self, num_ranks: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) of so many ranks. ConfigError where they are others, or cannot be dealt out `ep` by `ep`."""
        shard = self.dp_shard or max(1, num_ranks // self.dp_replicate)
        if self.dp_replicate * shard != num_ranks:
            raise ConfigError(
                f"train.mesh must be of the {num_ranks} processes that train, got dp_replicate {self.dp_replicate} x dp_shard "
                f"{shard}. Change one of them, or the processes of the actor's group"
            )
        if shard % self.ep:
            raise ConfigError(
                f"train.mesh.ep must divide the processes that one copy of the model is cut over, got ep {self.ep} with dp_shard "
                f"{shard}. Change one of them"
            )
        return self.dp_replicate, shard

    def of_scorers(self, num_ranks: int) -> MeshConfig:
        """Of a group of so many processes that only scores: one copy over all of them, its experts over as many of them as share
        them out in training, or the greatest divisor of that which fits."""
        return MeshConfig(ep=math.gcd(self.ep, num_ranks))


class LoraConfig(Section):
    """Adapters of low rank: the base stays as it is, and beside chosen products of it two small matrices each are trained
    (`models/lora.py`). What each field means is what it means in peft."""

    place = "train.lora"
    rank: int = Field(16, ge=1)
    """Of the two matrices of a product; peft's `r`."""
    alpha: float = Field(32.0, gt=0)
    """An adapter's part is multiplied by alpha / rank; peft's `lora_alpha`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of what goes into an adapter while it learns demonstrations (`sft`); peft's `lora_dropout`. Log-probs of a policy are
    computed without."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Which products get an adapter: "all-linear" is every one of the language model but the output layer; else modules of the
    language model by the end of their paths ("q_proj", "layers.0.mlp.up_proj"), or a part of the model with all of its products
    ("language", "vision", "audio", "projector"). What no module of the language model is called is looked for in the others.
    Experts of a mixture have adapters where they are named ("experts", "experts.down_proj"), each one its own."""
    publish: Literal["adapter", "merged"] = "adapter"
    """What engines get of a version: the adapter alone, which they compute beside the base that they have loaded, or all weights
    with the adapter merged into them, for engines that take no adapters."""

    def refused(self) -> Iterator[str]:
        if not self.targets:
            yield "train.lora.targets must name modules, got none. Name some, or set it to 'all-linear'"
        elif isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            yield (
                f"train.lora.targets must be {ALL_LINEAR!r} or a list of names, got {self.targets!r}. Write it as "
                f"[{self.targets!r}]"
            )


class ModelConfig(Section):
    """The policy as it is before the first step."""

    path: Annotated[str | None, _OF_MODEL] = None
    """A Hugging Face folder, the name of one on the hub, or a GGUF file, of which the run writes such a folder."""
    build: Annotated[FunctionRef | None, _OF_MODEL] = None
    """Or a function `build(folder: Path, **build_args)` that writes such a folder: config, tokenizer and weights."""
    build_args: Annotated[dict[str, Any], _OF_MODEL] = Field(default_factory=dict)
    """What `build` is called with, by name."""
    dtype: Dtype = "auto"
    """Of the weights that engines serve; "auto" is bfloat16 where the rollout has devices, else float32. Training keeps float32
    weights; `train.dtype` is that of its computation."""
    attn: Attn = "auto"
    """Attention of the trained and scoring models, by its name in transformers. "auto" is the best that a device has and the
    model takes: flash_attention_2 on a GPU in half precision with the package flash-attn, else flex_attention on a GPU, else
    sdpa, which is a family's own plain one where it has no other. Kernels are proved on the model and its device before they are
    used. With all but "eager" a micro-batch computes a prompt once for all of its samples, where every layer is causal attention,
    full or in a window; other layers take "sdpa" and "eager" alone."""

    def refused(self) -> Iterator[str]:
        if (self.path is None) == (self.build is None):
            yield (
                "model.path and model.build must be set one without the other, "
                f"got {'neither' if self.path is None else 'both'}. "
                "Set model.path to a Hugging Face folder, or model.build to a function that writes one"
            )
        if self.build is None and self.build_args:
            yield (
                f"model.build_args must be empty without model.build, got {self.build_args!r}. "
                "Set model.build, or remove model.build_args"
            )

    @property
    def recipe(self) -> tuple[str, dict[str, Any]] | None:
        """(the function that writes the model's folder, its arguments); None where there is one already."""
        if self.build is not None:
            return self.build, self.build_args
        return (GGUF, {"file": self.path}) if self.path is not None and self.path.endswith(".gguf") else None
