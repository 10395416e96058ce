"""The repeated blocks of a model, and computing with copies of their parameters: in another dtype, or gathered by FSDP2.

Owns which modules are a unit, where a unit's parameters are attached, lending it copies while its forward runs, so that one
unit's copies exist at a time, and letting go of what FSDP2 gathered. Does not own what is lent when: to the training forward
(`parallel/`), to trials (`trials.py`).

    layer.forward = on_copies(layer, owned(layer), torch.bfloat16)
    with computing_in(model, torch.float32): logits = model(...).logits
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rondo.models.families import family_of

Owned = list[tuple[nn.Module, str, nn.Parameter]]
"""(module, name in it, parameter)"""


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks of `model` (its encoders' too), outermost first; each is sharded and recomputed as a whole."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    towers = towers_of(model)  # some families name them among the modules not to split, but their blocks repeat too
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        repeated = type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer)
        if repeated and not inside and module not in towers:
            found[name] = module
    return list(found.values())


def towers_of(model: Any) -> list[nn.Module]:
    """The encoders of a multimodal model."""
    family = family_of(model)
    paths = dict.fromkeys(family.towers.values()) if family is not None else {}
    return [model.get_submodule(path) for path in paths]


def on_copies(unit: nn.Module, places: Owned, dtype: torch.dtype) -> Callable[..., Any]:
    """The forward of `unit` on copies of its parameters in `dtype`."""
    forward = unit.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _lending(places, dtype):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _lending(places: Owned, dtype: torch.dtype) -> Iterator[None]:
    copies = {parameter: parameter.to(dtype) for _, _, parameter in places}  # tied parameters share one copy
    try:
        for module, name, parameter in places:
            module._parameters[name] = copies[parameter]  # not a leaf: gradients flow on to `parameter`
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def owned(unit: nn.Module, but: Iterable[nn.Module] = ()) -> Owned:
    """Where the whole float parameters of `unit` are attached, without those inside of `but` and those that FSDP2 has cut."""
    skipped = {module for each in but for module in each.modules()}
    return [
        (module, name, parameter)
        for module in unit.modules()
        if module not in skipped
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point() and not isinstance(parameter, DTensor)
    ]


def sharded_units(model: Any) -> list[FSDPModule]:
    """The units that FSDP2 gathers, one by one; none of a model in one process."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def drop_copies(model: Any) -> None:
    """Free what FSDP2 gathered, so that the model's parameters are the shards again, and the next forward gathers anew.

    FSDP2 keeps the root's copies from a forward to its backward, in place of the shards: also when no backward comes.
    """
    for unit in sharded_units(model):
        unit.reshard()


@contextmanager
def computing_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """While the body runs, forwards of `model` compute in `dtype`, buffers included; what FSDP2 has cut, as it was told."""
    layers = decoder_layers(model)
    units = [(model, owned(model, but=layers)), *((layer, owned(layer)) for layer in layers)]
    others = [(unit, places) for unit, places in units if any(p.dtype != dtype for *_, p in places)]
    forwards = [(unit, unit.__dict__.get("forward")) for unit, _ in others]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() and buffer.dtype != dtype
    ]
    try:
        for unit, places in others:
            unit.forward = on_copies(unit, places, dtype)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(dtype)
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for unit, forward in forwards:
            if forward is None:
                del unit.forward
            else:
                unit.forward = forward
