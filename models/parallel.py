"""One model over several processes: FSDP2, mixed precision, activation checkpointing, and what is done to its gradients.

Owns how a model is cut (every decoder layer is a unit, the rest is the root's; encoders are whole on every rank, or units of
their own), which dtype its computation has, and how gradients are summed, scaled and clipped. Does not own which ranks these are
(`mesh.py`), how a cut model gets its weights (`filling.py`), forward passes (`logprobs.py`) or the optimizer
(`optimizer.py`).

Precision: parameters, gradients and moments are float32; with `compute_in(model, "bfloat16")`, or "float16", a unit computes with
copies of its parameters in that, and gradients flow back through the cast. FSDP2's mixed precision does that over several
processes; one process without it does the same by lending each unit the copies while its forward runs. torch.autocast is not
used: it would keep norms and the residual stream in float32, and so give other log-probs than several processes, or a scoring
model in bfloat16.

Invariants: after `scale_gradients` a gradient is the sum over ranks times the factor, however the step is cut into ranks and
micro-batches. Between two micro-batches a rank holds of a copy's parameters and gradients its shards alone.

    model = load_model(path, cut=lambda model: shard(model, mesh))
    packing = accept(model); compute_in(model, "bfloat16")
    for each micro-batch: set_last(model, last); loss.backward()
    scale_gradients(model, 1 / count); norm = clip_grad_norm(model, 1.0)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rondo.models.compiling import check_compiler, compile_layers
from rondo.models.mesh import Mesh
from rondo.models.names import kept_in_float32, local_part
from rondo.models.packing import can_share_rows
from rondo.models.routing import the_same_way
from rondo.models.shared_prompts import share_prompts
from rondo.models.units import decoder_layers, drop_copies, on_copies, owned, sharded_units, towers_of
from rondo.runtime.errors import ConfigError

_BUCKET_TENSORS = 64
_in_float32: WeakSet[Any] = WeakSet()
"""Units of what stays in float32."""


def shard(model: Any, mesh: Mesh, *, param_dtype: str = "float32", encoders: str = "replicate") -> None:
    """Cut `model` (whole on every rank, or on the meta device and filled later) over `mesh`; in place. Collective. Until
    `compute_in` says otherwise it computes in float32; `param_dtype` is what that will say.

    `encoders` "replicate" leaves those of a multimodal model whole on every rank: no gathering in their forward, and one sum of
    their gradients an update. "shard" cuts them like the decoder, in units apart from its.

    One process keeps the model untouched.
    """
    if mesh.ranks is None:
        return
    layers, towers = decoder_layers(model), towers_of(model)
    whole = {module for tower in towers for module in tower.modules()} if encoders == "replicate" else set[nn.Module]()
    ignored = {parameter for module in whole for parameter in module.parameters(recurse=False)}

    def cut(unit: nn.Module, **options: Any) -> None:
        # Units get what the one before computed, in its dtype. Positions stay float32, for bfloat16 cannot tell 256 from 257.
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        fully_shard(unit, mesh=mesh.sharded_over, mp_policy=policy, **options)

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
    can_share_rows(model)
    share_prompts(model)
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
    compute, kept = getattr(torch, dtype), _kept(model)
    _gather_in(model, compute)

    if compiled:
        check_compiler(device)
        encoders = {module for tower in towers for module in tower.modules()}
        compile_layers(layer for layer in layers if layer not in encoders)

    def lend(unit: Any, but: list[nn.Module] | None = None) -> None:
        places = [place for place in owned([unit], but or ()) if place[2] not in kept and place[2].dtype != compute]
        if places:
            unit.forward = on_copies(unit, places, compute)

    for layer in layers:
        # Lent inside of what runs again: copies are there for the second run too.
        lend(layer)
        if activation_checkpointing:
            layer.forward = _recomputed(layer, layer.forward)
    outside = towers if sharded_units(model) else [model]
    for unit in outside:
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


# ---- gradients ----------------------------------------------------------------------------------------------------------


def set_last(model: Any, last: bool) -> None:
    """Whether the next backward is the last of an update: each sums the gradients of a copy's ranks into their shards, the last
    one sums those of all copies."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


def scale_gradients(model: Any, factor: float) -> None:
    """Every gradient becomes its sum over ranks times `factor`, after the last backward of a step (collective when encoders are
    replicated)."""
    _average_replicated(model)
    num_ranks = dist.get_world_size() if isinstance(model, FSDPModule) else 1
    _scale(model, factor * num_ranks)  # FSDP2 leaves means


def _average_replicated(model: Any) -> None:
    """The gradients of what every rank holds whole become their mean over ranks, as FSDP2 makes those of the rest."""
    if not isinstance(model, FSDPModule):
        return
    trained = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    for start in range(0, len(trained), _BUCKET_TENSORS):
        bucket = trained[start : start + _BUCKET_TENSORS]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = mean.view_as(parameter)


def _scale(model: Any, factor: float) -> None:
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_grad_norm(model: Any, max_norm: float) -> float:
    """The norm of the whole gradient, which is then scaled down to `max_norm` if it is greater (collective when sharded).

    A norm that is not finite is returned, and the gradient left as it is: such a step must not be taken.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return 0.0
    # Gradients that are cut alike are summed together, over the dimensions of their mesh that they are cut over.
    layouts: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        layouts.setdefault(layout, []).append(local_part(gradient))
    square = torch.zeros((), device=gradients[0].device)
    for layout, alike in layouts.items():
        part = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(alike))).square()
        if layout is not None:
            mesh, placements = layout
            for dimension in (d for d, placement in enumerate(placements) if placement.is_shard()):
                dist.all_reduce(part, group=mesh.get_group(dimension))
        square += part
    norm = float(square.sqrt())
    if max_norm < norm < float("inf"):
        _scale(model, max_norm / norm)
    return norm


def discard_gradients(model: Any) -> None:
    """Forget all gradients, also what FSDP2 holds back between `set_last(model, False)` and the last backward."""
    drop_copies(model)
    for parameter in model.parameters():
        parameter.grad = None
    for unit in sharded_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group._partial_reduce_output = None


# ---- forward of a unit --------------------------------------------------------------------------------------------------


def _recomputed(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that keeps its inputs only, and runs again in the backward."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=the_same_way, **kwargs)
        return forward(*args, **kwargs)

    return run
