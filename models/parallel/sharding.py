"""One model over several processes: FSDP2, mixed precision and activation checkpointing.

Owns how a model is cut (every decoder layer is a unit, the rest is the root's; encoders are whole on every rank, or units of
their own) and which dtype its computation has. Does not own which ranks these are (`models/mesh.py`), experts that lie apart
(`experts.py`), what is done to gradients (`gradients.py`), how a cut model gets its weights (`models/filling.py`) or forward
passes (`models/logprobs.py`).

Precision: parameters, gradients and moments are float32; with `compute_in(model, "bfloat16")`, or "float16", a unit computes with
copies of its parameters in that, and gradients flow back through the cast. FSDP2's mixed precision does that over several
processes; one process without it does the same by lending each unit the copies while its forward runs. torch.autocast is not
used: it would keep norms and the residual stream in float32, and so give other log-probs than several processes, or a scoring
model in bfloat16.

Invariant: between two micro-batches a rank holds of a copy's parameters and gradients its shards alone.

    model = load_model(path, cut=lambda model: shard(model, mesh))
    packing = accept(model); compute_in(model, "bfloat16")
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rondo.models.compiling import check_compiler, compile_layers
from rondo.models.mesh import Mesh
from rondo.models.names import kept_in_float32
from rondo.models.packing import why_alone
from rondo.models.parallel.experts import spread, stay_outside_of_graphs
from rondo.models.routing import the_same_way
from rondo.models.shared_prefixes import why_apart
from rondo.models.units import decoder_layers, drop_copies, on_copies, owned, sharded_units, towers_of
from rondo.models.value_head import whole_heads
from rondo.runtime.errors import ConfigError

_in_float32: WeakSet[Any] = WeakSet()
"""Units of what stays in float32."""


def shard(model: Any, mesh: Mesh, *, param_dtype: str = "float32", encoders: str = "replicate") -> None:
    """Cut `model` (whole on every rank, or on the meta device and filled later) over `mesh`; in place. Collective. Until
    `compute_in` says otherwise it computes in float32; `param_dtype` is what that will say.

    `encoders` "replicate" leaves those of a multimodal model whole on every rank: no gathering in their forward, and one sum of
    their gradients an update. "shard" cuts them like the decoder, in units apart from its.

    Experts of a mixture are shared out first where the mesh says so. One process keeps the model untouched.
    """
    if mesh.ranks is None:
        return
    layers, towers = decoder_layers(model), towers_of(model)
    whole = {module for tower in towers for module in tower.modules()} if encoders == "replicate" else set[nn.Module]()
    ignored = {parameter for module in whole for parameter in module.parameters(recurse=False)} | whole_heads(model)
    placed = spread(model, mesh)

    def cut(unit: nn.Module, **options: Any) -> None:
        # Units get what the one before computed, in its dtype. Positions stay float32, for bfloat16 cannot tell 256 from 257.
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        fully_shard(unit, mesh=mesh.sharded_over, mp_policy=policy, shard_placement_fn=placed, **options)

    for unit in _apart(model, _kept(model), param_dtype) if param_dtype != "float32" else ():
        cut(unit)
        _in_float32.add(unit)
    for unit in (*layers, *(towers if encoders == "shard" else ())):
        if unit not in whole:
            cut(unit)
    cut(model, ignored_params=ignored or None)


def compute_in(
    model: Any, dtype: str = "float32", *, activation_checkpointing: bool = False, compiled: bool = False
) -> Any:
    """`model`, whose forwards compute in `dtype` from now on; with checkpointing, a backward runs its layers again; the decoder's
    run `compiled`. Once, after what is tried out of it in float32.

    What FSDP2 has cut is cast as it is gathered; of the rest, each unit is lent copies. In one process, in float32 and without
    checkpointing, the model stays untouched.
    """
    # What is found out by trying stays so (collective where it is not known yet).
    why_alone(model)
    why_apart(model)
    layers, towers, device = decoder_layers(model), towers_of(model), next(model.parameters()).device
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"train.dtype must be float16 or float32 on a device that does not compute in bfloat16, got bfloat16 on "
            f"{torch.cuda.get_device_name(device)}. Set it to float16"
        )
    for name, wanted in (("activation_checkpointing", activation_checkpointing), ("compile", compiled)):
        if wanted and not layers:
            raise ConfigError(
                f"train.{name} must have decoder layers to act on, got none in {type(model).__name__}. Set it to False"
            )
    compute, kept = getattr(torch, dtype), _kept(model) | whole_heads(model)
    _gather_in(model, compute)

    if compiled:
        check_compiler(device)
        stay_outside_of_graphs(model)
        encoders = {module for tower in towers for module in tower.modules()}
        compile_layers(layer for layer in layers if layer not in encoders)

    def lend(unit: Any, but: Iterable[nn.Module] = ()) -> None:
        places = [place for place in owned(unit, but) if place[2] not in kept and place[2].dtype != compute]
        if places:
            unit.forward = on_copies(unit, places, compute)

    for layer in layers:
        # Lent inside of what runs again: copies are there for the second run too.
        lend(layer)
        if activation_checkpointing:
            layer.forward = _recomputed(layer, layer.forward)
    for unit in towers if sharded_units(model) else [model]:
        lend(unit, layers)
    return model


def _gather_in(model: Any, dtype: torch.dtype) -> None:
    """What FSDP2 gathers is in `dtype`, but for the units of what stays in float32."""
    drop_copies(model)
    for unit in sharded_units(model):
        for group in () if unit in _in_float32 else unit._get_fsdp_state()._fsdp_param_groups:
            group.mp_policy = replace(group.mp_policy, param_dtype=dtype)
            for held in group.fsdp_params:  # made for the dtype before
                held.all_gather_outputs = []
                if hasattr(held, "_unsharded_param"):
                    del held._unsharded_param
            group._init_mp_dtypes()


def _kept(model: Any) -> set[nn.Parameter]:
    return {model.get_parameter(name) for name in kept_in_float32(model) & dict(model.named_parameters()).keys()}


def _apart(model: Any, kept: set[nn.Parameter], dtype: str) -> list[nn.Module]:
    """The modules of the parameters that stay in float32, outermost, as units of their own."""
    units, inside = [], set[nn.Module]()
    for unit in model.modules():
        if unit in inside or not any(p in kept for p in unit.parameters(recurse=False)):
            continue
        units.append(unit)
        inside.update(unit.modules())
        if any(parameter not in kept for parameter in unit.parameters()):
            raise ConfigError(
                f"train.dtype must be float32 for {type(model).__name__} in several processes: {type(unit).__name__} has "
                f"parameters that stay in float32 beside others that do not, got {dtype}. Set it to float32"
            )
    return units


# ---- forward of a unit --------------------------------------------------------------------------------------------------


def _recomputed(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that keeps its inputs only, and runs again in the backward."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=the_same_way, **kwargs)
        return forward(*args, **kwargs)

    return run
