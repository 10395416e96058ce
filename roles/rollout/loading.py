"""Tensors in Hugging Face disk naming into a module, in place.

Owns the check of names and shapes, and the way from disk names to a module's own (a Qwen3-MoE layer has one tensor for all
experts in memory and one for each expert on disk). Does not own where the tensors come from.

Invariant: everything is checked before the first byte is written, and every parameter keeps its storage.

    DiskLoader(model).load({"model.embed_tokens.weight": ..., ...})
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rondo.runtime.errors import ConfigError


class DiskLoader:
    """Loads complete sets of tensors into `model`, any transformers causal LM. Tied parameters may be named once, by the
    name that checkpoints use, or also by their other names, then with equal values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._targets: dict[str, torch.Tensor] = dict(model.named_parameters())
        kept = {id(parameter): name for name, parameter in self._targets.items()}
        everything = dict(model.named_parameters(remove_duplicate=False))
        self._tied = {name: kept[id(p)] for name, p in everything.items() if kept[id(p)] != name}
        self._targets |= {name: tensor for name, tensor in model.state_dict().items() if name not in everything}
        on_disk = revert_weight_conversion(model, {name: t.detach().to("meta") for name, t in self._targets.items()})
        self._shapes = {name: tuple(tensor.shape) for name, tensor in on_disk.items()}
        self._plan = self._plan_of(model)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies `tensors` (any dtype and device) in. Raises ConfigError, having written nothing, unless names and shapes
        are exactly the model's."""
        self._check(tensors)
        with torch.no_grad():
            for target, (converter, sources) in self._plan.items():
                if converter is None:
                    self._targets[target].copy_(tensors[sources[0][0]])
                    continue
                conversion = deepcopy(converter)
                for name, pattern in sources:
                    conversion.add_tensor(target, name, pattern, tensors[name])
                for name, value in conversion.convert(target, model=self._model, config=self._model.config).items():
                    self._targets[name].copy_(value[0] if isinstance(value, list) else value)

    def _plan_of(self, model: Any) -> dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]]:
        """Target name -> (its conversion or None for a plain copy, [(disk name, pattern it matched)])."""
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [entry for entry in conversions if not isinstance(entry, PrefixChange)]
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        plan: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
        for name in sorted(self._shapes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, self._targets)
            converter = of_pattern[pattern] if pattern is not None else None
            plan.setdefault(target, (converter, []))[1].append((name, pattern or name))
        return plan

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        extra = [name for name in tensors if name not in self._shapes and name not in self._tied]
        missing = [name for name in self._shapes if name not in tensors]
        shapes = [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in self._shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        found = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for what, names in (("missing", missing), ("unknown", extra), ("of another shape", shapes))
            if names
        ]
        if found:
            raise ConfigError(
                f"published tensors must have exactly the names and shapes of {type(self._model).__name__}, "
                f"got {'; '.join(found)}. Publish from a model of the same config, in Hugging Face disk names."
            )
        for name, source in self._tied.items():
            if name in tensors and not torch.equal(tensors[name], tensors[source]):
                raise ConfigError(
                    f"{name} must equal {source}, to which the config ties it, got other values. Publish {source} alone."
                )
