"""Between a model's tensors in memory and their names on disk, which are also the names that are published.

Owns the plan of a model: which tensors in memory become which on disk. Most only carry another name or none; a Qwen3-MoE layer
has one tensor for all experts in memory and three for each expert on disk. Names are those of the folder that the model was
loaded from: the thinker of a whole Qwen3-Omni keeps its `thinker.`, which engines that serve that folder expect. The conversions
themselves are transformers' own. Does not own gathering shards (`parallel.py`) or files (`checkpoint.py`).

Invariant: the plan covers every parameter once (tied ones under their first name) and every persistent buffer; what is
written by one direction is read back by the other, bit by bit.

    memory  model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]
    disk    model.layers.0.mlp.experts.{e}.gate_proj.weight [I, H], ...up_proj.weight [I, H]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rondo.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors in memory (`sources`) that become tensors on disk (name -> shape) together, without any others."""

    sources: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    renamed: bool
    """One tensor under another name, or the same: nothing to convert."""


_plans: WeakKeyDictionary[Any, tuple[Group, ...]] = WeakKeyDictionary()


def memory_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter under its first name, and every persistent buffer; whole, or this rank's DTensor."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    persistent = buffers.keys() & model.state_dict().keys()
    return parameters | {name: tensor for name, tensor in buffers.items() if name in persistent}


def kept_in_float32(model: Any) -> frozenset[str]:
    """Names in memory of what transformers keeps in float32 beside bfloat16 weights: routers, their biases, in some families."""
    plan = model._get_dtype_plan(torch.bfloat16)
    if not plan:
        return frozenset()
    pattern, *_ = build_glob_alternation(list(plan))
    return frozenset(name for name in memory_tensors(model) if pattern.search(name))


def disk_groups(model: Any) -> tuple[Group, ...]:
    """The plan of `model`, worked out once."""
    if model not in _plans:
        _plans[model] = tuple(_plan(model))
    return _plans[model]


def disk_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape."""
    return {name: shape for group in disk_groups(model) for name, shape in group.shapes.items()}


def to_disk(model: Any, group: Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors of `group` as they are named on disk; views of `tensors` where the family allows it."""
    if group.renamed:
        return dict(zip(group.shapes, tensors.values(), strict=True))
    return _reverted(model, tensors)


def load_disk_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` (disk names, any dtype and device) into an unsharded `model`, in place.

    A tied weight may also come under its other names, which are ignored. Raises ConfigError, having written nothing, unless
    names and shapes are exactly the model's.
    """
    _check(model, tensors)
    memory = memory_tensors(model)
    renamings, converters = _conversions(model)
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    with torch.no_grad():
        for group in disk_groups(model):
            if group.renamed:
                memory[group.sources[0]].copy_(tensors[next(iter(group.shapes))])
                continue
            pending: dict[str, WeightConverter] = {}
            for name in sorted(group.shapes, key=dot_natural_key):
                target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, memory)
                if pattern is None:
                    memory[target].copy_(tensors[name])
                    continue
                converter = pending.setdefault(target, deepcopy(of_pattern[pattern]))
                converter.add_tensor(target, name, pattern, tensors[name])
            for target, converter in pending.items():
                for name, value in _flat(converter.convert(target, model=model, config=model.config)).items():
                    memory[name].copy_(value)


def unknown_tensors(model: Any, names: Iterable[str]) -> set[str]:
    """Of tensors in a folder's files, those that `model` has no place for when it loads, by their names in memory. Without what
    transformers says may be left out."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    places, unknown = model.state_dict(), set[str]()
    for name in sorted(names, key=dot_natural_key):
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if renamed not in places and name not in places:
            unknown.add(renamed)
    found = SimpleNamespace(missing_keys=set[str](), unexpected_keys=unknown)
    model._adjust_missing_and_unexpected_keys(found)
    return set(found.unexpected_keys)


def _plan(model: Any) -> list[Group]:
    """Found by trying on empty tensors: each alone, then together those that make parts of the same tensor on disk."""
    empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in memory_tensors(model).items()}
    joined: dict[str, list[str]] = {}  # first name on disk -> names in memory
    for name, tensor in empty.items():
        joined.setdefault(min(_reverted(model, {name: tensor})), []).append(name)
    groups = []
    for names in joined.values():
        on_disk = _reverted(model, {name: empty[name] for name in names})
        renamed = len(on_disk) == len(names) == 1 and next(iter(on_disk.values())) is empty[names[0]]
        groups.append(Group(tuple(names), {key: tuple(value.shape) for key, value in on_disk.items()}, renamed))
    covered = {key: shape for group in groups for key, shape in group.shapes.items()}
    if covered != {key: tuple(value.shape) for key, value in _reverted(model, empty).items()}:
        raise ConfigError(
            f"the tensors of {type(model).__name__} must become those on disk group by group, got some that do not. "
            "Train a model of another family"
        )
    return groups


def _reverted(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return _flat(revert_weight_conversion(model, dict(tensors)))


def _conversions(model: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Disk to memory: those that the model was loaded with, else its family's, as transformers itself decides it."""
    found = getattr(model, "_weight_conversions", None)
    if found is None:
        found = [
            entry
            for entry in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(entry, PrefixChange)
        ]
    renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in found if isinstance(entry, WeightConverter)]


def _flat(converted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _check(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    shapes = disk_shapes(model)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    wrong = {
        "missing": [name for name in shapes if name not in tensors],
        "unknown": [name for name in tensors if name not in shapes and name not in tied],
        "of another shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    found = [f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in wrong.items() if names]
    if found:
        raise ConfigError(
            f"tensors must have exactly the names and shapes of {type(model).__name__} on disk, got {'; '.join(found)}. "
            "Take them from a model of the same config"
        )
