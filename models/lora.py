"""Adapters of low rank (LoRA): beside a product with a frozen weight a small one, which alone is trained.

    y = x W^T + (alpha / rank) (x A^T) B^T        A [rank, in], B [out, rank]; Hu et al. 2021 (arXiv 2106.09685), equation 3

Owns which products of a model have one, how it is computed, what it begins with, weights that have it merged into them, and its
names, in memory, in a published version and on disk: they are peft's. Does not own how it is trained (`roles/training/`), nor
the folder that peft loads (`hf_folder.py`). peft itself wraps modules, and so gives every weight of the base another name in
memory; here a product gets two more tensors, and all that is known of a model by its names and its cut stays true.

    memory       model.layers.0.self_attn.q_proj.lora_A.weight
    published    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

The experts of a layer lie in one tensor, and so do their adapters: A [E, rank, in], B [E, out, rank], each expert's own, computed
by grouped products as their weights are (`parallel/experts.py`). In a folder they lie as peft has them (`for_peft`).

A value head (`value_head.py`) is trained whole beside adapters, and goes with them: in a folder it is peft's module to save.

Every rank holds the adapters, and such a head, whole, also where FSDP2 has cut the base, or experts lie apart: they are a
hundredth of it, so a micro-batch sends nothing for them, and their gradients are summed once an update.

Invariant: a fresh adapter changes nothing, for its B is 0; and what it draws depends on the seed and its name alone.

    adapt(model, settings, seed=0, dtype=torch.float32)
    with base_alone(model): reference = model(...)
    load_published(model, {name: tensor ...})
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import _grouped_linear

from rondo.models.config import LoraConfig
from rondo.models.families import family_of
from rondo.models.names import (
    HEAD,
    SCORE,
    adapter_tensors,
    load_disk_tensors,
    local_part,
    own_slices,
    with_local_part,
)
from rondo.models.parallel.experts import experts_of, in_one_piece
from rondo.models.parts import LANGUAGE, part_of
from rondo.models.random_weights import key_of
from rondo.runtime.errors import ConfigError

PREFIX = "base_model.model."
"""peft's own: of the module that it puts around a model."""
PARTS = (LANGUAGE, "vision", "audio", "projector")
_BESIDE = "_adapter"
"""Behind the name of a weight of experts: the module beside it."""
_ON_DISK = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""What routers and products of experts are called there, each by itself."""
_OF_EXPERTS = re.compile(rf"(.+)\.(gate_up|down)_proj{_BESIDE}\.lora_([AB])\.weight")
_ALIGNED = 8
"""Numbers: kernels of grouped products want rows that are a multiple of 16 bytes apart."""
_CANARY_SPREAD = 0.5
"""Of what the canary adds to a weight, times the square root of what goes into it: about what a model begins its weights with."""


class Adapter:
    lora_A: Any  # peft's names
    lora_B: Any
    settings: LoraConfig
    alone = False
    """The base computes as if it had no adapter."""
    learns = False
    """Dropout is on."""

    @property
    def scaling(self) -> float:
        return self.settings.alpha / self.settings.rank

    def dropped_out(self, input: torch.Tensor) -> torch.Tensor:
        return F.dropout(input, self.settings.dropout, self.learns) if self.learns else input


class Adapted(nn.Linear, Adapter):
    """A product with an adapter. Made of one that is there already, whose parameters it keeps."""

    @classmethod
    def of(cls, module: nn.Linear, settings: LoraConfig, dtype: torch.dtype | None) -> Adapted:
        how: dict[str, Any] = {"bias": False, "device": module.weight.device, "dtype": dtype or module.weight.dtype}
        module.__class__ = cls
        assert isinstance(module, cls)
        module.lora_A = nn.utils.skip_init(nn.Linear, module.in_features, settings.rank, **how)
        module.lora_B = nn.utils.skip_init(nn.Linear, settings.rank, module.out_features, **how)
        module.settings = settings
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        if self.alone:
            return found
        narrow = F.linear(self.dropped_out(input), self.lora_A.weight.to(input.dtype))
        return found.add(F.linear(narrow, self.lora_B.weight.to(input.dtype)), alpha=self.scaling)


class _Stack(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class OfExperts(nn.Module, Adapter):
    """The adapters beside one weight of the experts of a layer [E, out, in]: called with their product, with the rows that went
    into it, expert by expert, where each expert's end, and which experts are here."""

    @classmethod
    def of(cls, experts: Any, name: str, settings: LoraConfig, dtype: torch.dtype | None) -> OfExperts:
        made, weight = cls(), getattr(experts, name)
        num_experts, num_outputs, num_inputs = weight.shape
        how: dict[str, Any] = {"device": weight.device, "dtype": dtype or weight.dtype}
        made.lora_A = _Stack(torch.empty(num_experts, settings.rank, num_inputs, **how))
        made.lora_B = _Stack(torch.empty(num_experts, num_outputs, settings.rank, **how))
        made.settings = settings
        experts.add_module(f"{name}{_BESIDE}", made)
        if "forward" not in vars(experts):  # they do not lie apart
            experts.forward = functools.partial(in_one_piece, experts)
        return made

    def forward(
        self, found: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, here: tuple[slice, ...]
    ) -> torch.Tensor:
        if self.alone:
            return found
        narrow, wide = (each.weight[here].to(rows.dtype) for each in (self.lora_A, self.lora_B))
        beyond = -self.settings.rank % _ALIGNED
        narrow, wide = F.pad(narrow, (0, 0, 0, beyond)), F.pad(wide, (0, beyond))
        return found.add(
            _grouped_linear(_grouped_linear(self.dropped_out(rows), narrow, ends), wide, ends), alpha=self.scaling
        )


def adapt(model: Any, settings: LoraConfig, *, seed: int = 0, dtype: torch.dtype | None = None) -> None:
    """Gives products of `model`, whole or cut, a fresh adapter of `dtype` (None: that of the product), in place; nothing else of
    it is trained from now on, but a value head.

    Raises ConfigError for targets that are not in the model or cannot have one.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == getattr(model, HEAD, None))
    for path, module in _chosen(model, settings.targets).items():
        linear, name = isinstance(module, nn.Linear), path.rpartition(".")[2]
        made: Any = Adapted.of(module, settings, dtype) if linear else OfExperts.of(module, name, settings, dtype)
        if made.lora_A.weight.is_meta:
            continue
        draw = np.random.Generator(np.random.Philox(key=key_of(f"adapter {seed}", path)))
        shape = made.lora_A.weight.shape
        bound = shape[-1] ** -0.5
        with torch.no_grad():
            made.lora_A.weight.copy_(torch.from_numpy(draw.uniform(-bound, bound, shape)))
            made.lora_B.weight.zero_()


def adapted(model: Any) -> dict[str, Any]:
    """Path -> product that has an adapter, or the adapters of the experts of a layer, in their order in the model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Adapter)}


def base_alone(model: Any) -> AbstractContextManager[None]:
    """While the body runs, `model` computes what it computed before it was adapted."""
    return _set(model, "alone")


def learning(model: Any) -> AbstractContextManager[None]:
    """While the body runs, what goes into adapters is dropped out, as the settings say."""
    return _set(model, "learns")


@contextmanager
def _set(model: Any, flag: str) -> Iterator[None]:
    products = list(adapted(model).values())
    try:
        for product in products:
            setattr(product, flag, True)
        yield
    finally:
        for product in products:
            setattr(product, flag, False)


# ---- which products -----------------------------------------------------------------------------------------------------


def _chosen(model: Any, targets: str | Iterable[str]) -> dict[str, nn.Module]:
    products, family, experts = _products(model), family_of(model), _weights_of_experts(model)
    parts = {path: part_of(family, f"{path}.weight") for path in products}
    found: set[str] = set()
    for target in (LANGUAGE,) if isinstance(targets, str) else targets:
        if target in PARTS:
            named = {path for path, part in parts.items() if part == target}
        else:
            named = {path for path in products if f".{path}".endswith(f".{target}")}
            named = {path for path in named if parts[path] == LANGUAGE} or named
            if not named:  # a weight of experts, or both
                named = {
                    at for at in experts if any(f".{e}".endswith(f".{target}") for e in (at, at.rpartition(".")[0]))
                }
        if not named:
            raise _no_product(model, target, products)
        found |= named
    return {path: module for path, module in (products | experts).items() if path in found}


def _weights_of_experts(model: Any) -> dict[str, nn.Module]:
    """Path of a weight -> the experts of a layer, of which it is."""
    return {
        f"{path}.{name}": experts
        for path, experts in experts_of(model).items()
        if experts.has_gate and experts.is_concatenated
        if not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
        for name in ("gate_up_proj", "down_proj")
    }


def _products(model: Any) -> dict[str, nn.Linear]:
    """What can have an adapter: not the output layer, whose weight is computed with piece by piece."""
    output = model.get_output_embeddings()
    return {
        path: module for path, module in model.named_modules() if type(module) is nn.Linear and module is not output
    }


def _no_product(model: Any, target: str, products: Mapping[str, Any]) -> ConfigError:
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in products))
    named = [(path, module) for path, module in model.named_modules() if f".{path}".endswith(f".{target}")]
    tensors = [name for name, p in model.named_parameters() if f".{name}".endswith(f".{target}") and p.ndim > 2]
    why = ""
    if tensors or any(p.ndim > 2 for _, module in named for p in module.parameters(recurse=False)):
        why = ": experts have adapters where they are two products and a gate, and no more"
    elif any(module is model.get_output_embeddings() for _, module in named):
        why = ": it is the output layer, which keeps its weight"
    return ConfigError(
        f"train.lora.targets must name products of {type(model).__name__} ({known}), or its parts ({', '.join(PARTS)}), got "
        f"{target!r}{why}. Correct it, or remove it"
    )


# ---- a published adapter ------------------------------------------------------------------------------------------------


def published_adapter(model: Any, dtype: str | None = None) -> dict[str, torch.Tensor]:
    """Published name -> the whole tensor, cast to `dtype`; without a cast it is the model's own. Empty without adapters."""
    cast = getattr(torch, dtype) if dtype is not None else None
    return {name: tensor.detach().to(cast or tensor.dtype) for name, tensor in _published(model).items()}


def _published(model: Any) -> dict[str, torch.Tensor]:
    """Published name -> the model's own tensor."""
    head = getattr(model, HEAD, None)
    return {f"{PREFIX}{SCORE if name == head else name}": each for name, each in adapter_tensors(model).items()}


def for_peft(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A published adapter as peft's folder holds it. It wraps the weights of experts, the second one around the first, and has
    what belongs to all of them in one matrix (`ParamWrapper` of its `tuners/lora/layer.py`).

    experts.gate_up_proj_adapter.lora_A.weight [E, rank, in]      experts.base_layer.lora_A.weight [E rank, in]
    experts.down_proj_adapter.lora_B.weight [E, out, rank]        experts.lora_B.weight [out, rank E]
    """
    found = {}
    for name, tensor in adapter.items():
        if (match := _OF_EXPERTS.fullmatch(name)) is None:
            found[name] = tensor
            continue
        at, product, half = match.groups()
        inside = product == "gate_up" and f"{at}.down_proj{_BESIDE}.lora_{half}.weight" in adapter
        flat = tensor.flatten(0, 1) if half == "A" else tensor.permute(1, 2, 0).flatten(1)
        found[f"{at}{'.base_layer' * inside}.lora_{half}.weight"] = flat
    return found


def adapter_config(
    names: Iterable[str], settings: LoraConfig, base: str, *, others: Iterable[str] = (), mixture: bool = False
) -> dict[str, Any]:
    """What peft and servers read of an adapter beside its tensors, of which these are the published names: adapter_config.json.

    others: paths of products without adapter. Where a target's last name is also one of theirs, targets are whole paths. mixture:
    of a model with experts. peft takes what has the name of an expert's product on disk for that, unless it is a parameter."""
    own = [name.removeprefix(PREFIX) for name in names]
    paths, scores = dict.fromkeys(name.rpartition(".lora_")[0] for name in own if name != SCORE), SCORE in own
    parameters = {path: path.removesuffix(_BESIDE) for path in paths if path.endswith(_BESIDE)}
    if mixture:
        parameters |= {path: f"{path}.weight" for path in paths if path.rpartition(".")[2] in _ON_DISK}
    modules = [path for path in paths if path not in parameters]
    last = dict.fromkeys(path.rpartition(".")[2] for path in modules)
    exact = last.keys().isdisjoint(path.rpartition(".")[2] for path in others)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0 if parameters else settings.dropout,  # peft has none of parameters, and would load nothing
        "target_modules": list(last) if exact else modules,
        **({"target_parameters": list(parameters.values())} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": ["score"] if scores else None,
        "use_rslora": False,
        "use_dora": False,
    }


def config_of(model: Any, base: str) -> dict[str, Any]:
    """The same of an adapted model."""
    products = adapted(model)
    inside = {child for module in products.values() for child in module.children()}
    others = [path for path, m in model.named_modules() if isinstance(m, nn.Linear) and m not in inside]
    others = [path for path in others if path not in products]
    settings, mixture = next(iter(products.values())).settings, bool(experts_of(model))
    return adapter_config(published_adapter(model), settings, base, others=others, mixture=mixture)


def load_published(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a published version into `model`, in place: its adapters where it is adapted, else all of its weights (disk names, as
    `load_disk_tensors`).

    Raises ConfigError, having written nothing, unless names and shapes are exactly the model's.
    """
    own = _published(model)
    if not own:
        load_disk_tensors(model, tensors)
        return
    shapes = {name: tensor.shape for name, tensor in own.items()}
    wrong = sorted(shapes.keys() ^ tensors.keys()) + [
        n for n in shapes if n in tensors and tensors[n].shape != shapes[n]
    ]
    if wrong:
        raise ConfigError(
            f"an adapter must have exactly the {len(shapes)} tensors of {type(model).__name__} as it is adapted here, got "
            f"{len(wrong)} that differ ({', '.join(wrong[:3])}). Take one that was trained with the same train.lora"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def canary_of(shapes: Mapping[str, Iterable[int]], settings: LoraConfig) -> dict[str, torch.Tensor]:
    """An adapter that changes every target much, float32, by the published names and shapes of one: whoever computes without a
    part of it computes something else. Any process draws the same."""
    found = {}
    for name, shape in shapes.items():
        shape = tuple(shape)
        draw = np.random.Generator(np.random.Philox(key=key_of("adapter 0", name)))
        # alpha / rank B A has entries of deviation _CANARY_SPREAD / sqrt(in).
        width = shape[-1] ** -0.5 if ".lora_A." in name else _CANARY_SPREAD * settings.rank**0.5 / settings.alpha
        found[name] = torch.from_numpy(draw.standard_normal(shape, np.float32) * np.float32(width))
    return found


@contextmanager
def in_place_of_adapters(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While the body runs, `model` has these adapters (published names)."""
    kept = {name: tensor.clone() for name, tensor in published_adapter(model).items()}
    try:
        load_published(model, tensors)
        yield
    finally:
        load_published(model, kept)


# ---- merged -------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """What is added to a weight: scaling x wide x narrow."""

    narrow: torch.Tensor  # A [rank, in], of experts [E, rank, in]
    wide: torch.Tensor  # B [out, rank], of experts [E, out, rank]
    scaling: float

    def merged(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weight`, or this rank's rows of it, as it computes alone what it computes with its adapter: added in float32."""
        rows, *_ = own_slices(weight, weight) or (slice(None),)
        wide, narrow = self.wide[rows].float(), (self.narrow if self.narrow.ndim < 3 else self.narrow[rows]).float()
        add = torch.addmm if narrow.ndim == 2 else torch.baddbmm
        local = add(local_part(weight).float(), wide, narrow, alpha=self.scaling)
        return with_local_part(weight.to(dtype), local.to(dtype))


def pairs(model: Any) -> dict[str, Pair]:
    """Name in memory -> what is added to that weight, of every product with an adapter: the live tensors, detached."""
    return {
        path.removesuffix(_BESIDE) if path.endswith(_BESIDE) else f"{path}.weight": Pair(
            each.lora_A.weight.detach(), each.lora_B.weight.detach(), each.scaling
        )
        for path, each in adapted(model).items()
    }
