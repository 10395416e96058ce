"""One model over several processes: FSDP2, mixed precision, activation checkpointing, and what is done to its gradients.

Owns how a model is cut (every decoder layer is a unit, the rest is the root's; encoders are whole on every rank, or units of
their own), which dtype its computation has, and how gradients are summed, scaled and clipped. Does not own forward passes
(`logprobs.py`) or the optimizer (`optimizer.py`).

Precision: parameters, gradients and moments are float32; with `param_dtype="bfloat16"` a unit computes with bfloat16 copies of
its parameters and gradients flow back through the cast. FSDP2's mixed precision does that over several processes; one process
without it does the same by lending each unit the copies while its forward runs. torch.autocast is not used: it would keep
norms and the residual stream in float32, and so give other log-probs than several processes, or a scoring model in bfloat16.

Invariant: after `scale_gradients` a gradient is the sum over ranks times the factor, however the step is cut into ranks and
micro-batches.

    model = shard(load_model(path), world_size=2, param_dtype="bfloat16")
    for each micro-batch: set_sync(model, last); loss.backward()
    scale_gradients(model, 1 / count); norm = clip_grad_norm(model, 1.0)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rondo.models.names import disk_groups, kept_in_float32, memory_tensors, to_disk
from rondo.models.packing import can_share_rows
from rondo.models.routing import the_same_way
from rondo.models.shared_prompts import share_prompts
from rondo.models.units import Owned, decoder_layers, on_copies, owned, towers_of
from rondo.runtime.errors import ConfigError

_BUCKET_TENSORS = 64
_replicated: WeakKeyDictionary[Any, set[nn.Parameter]] = WeakKeyDictionary()
"""Model -> the parameters that every rank holds whole."""


def shard(
    model: Any,
    *,
    world_size: int = 1,
    param_dtype: str = "float32",
    reduce_dtype: str = "float32",
    activation_checkpointing: bool = False,
    encoders: str = "replicate",
) -> Any:
    """`model` (float32, whole on every rank), ready to train; in place. Collective when `world_size` > 1.

    `encoders` "replicate" leaves those of a multimodal model whole on every rank: no gathering in their forward, and one sum of
    their gradients a step. "shard" cuts them like the decoder, in units apart from its.

    With one process in float32 and without checkpointing the model stays untouched. Checkpointing applies where a backward will.
    """
    layers, towers = decoder_layers(model), towers_of(model)
    # Both are found out once, on the whole model: before FSDP2 renames the classes by which transformers knows families.
    disk_groups(model)
    can_share_rows(model)
    share_prompts(model)
    if activation_checkpointing and not layers:
        raise ConfigError(
            f"train.activation_checkpointing must have decoder layers to recompute, got none in {type(model).__name__}. "
            "Set it to False"
        )
    compute, reduce = getattr(torch, param_dtype), getattr(torch, reduce_dtype)
    encoding = {module for tower in towers for module in tower.modules()}
    kept = {model.get_parameter(name) for name in kept_in_float32(model) & dict(model.named_parameters()).keys()}

    def cast_in(units: list[Any], but: list[nn.Module] | None = None) -> Owned:
        return [place for place in owned(units, but or ()) if place[2] not in kept]

    # What FSDP2 does not gather: everything in one process, or encoders that each rank holds whole.
    whole = [layer for layer in layers if world_size == 1 or (encoders == "replicate" and layer in encoding)]
    lent = whole if compute != torch.float32 else []
    for layer in layers:
        # Lent inside of what runs again: copies are there for the second run too.
        if layer in lent:
            layer.forward = on_copies(layer, cast_in([layer]), compute)
        if activation_checkpointing:
            layer.forward = _recomputed(layer, layer.forward)
    if world_size == 1:
        if compute != torch.float32:
            model.forward = on_copies(model, cast_in([model], layers), compute)
        return model
    mesh = dist.init_device_mesh(next(model.parameters()).device.type, (world_size,), mesh_dim_names=("fsdp",))
    # Units get what the one before computed, in its dtype. Positions stay float32, for bfloat16 cannot tell 256 from 257.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    ignored = set[nn.Parameter]()
    if encoders == "replicate" and towers:
        ignored = {parameter for tower in towers for parameter in tower.parameters()}
        _replicated[model] = ignored
        if compute != torch.float32:
            for tower in towers:
                tower.forward = on_copies(tower, cast_in([tower], layers), compute)
    for unit in _apart(model, kept) if compute != torch.float32 else ():
        fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False))
    for layer in layers:
        if layer not in whole:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    if encoders == "shard":
        for tower in towers:
            fully_shard(tower, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored or None)
    return model


def _apart(model: Any, kept: set[nn.Parameter]) -> list[nn.Module]:
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
                "parameters that stay in float32 beside others that do not, got bfloat16. Set it to float32"
            )
    return units


# ---- gradients ----------------------------------------------------------------------------------------------------------


def set_sync(model: Any, last: bool) -> None:
    """Whether the next backward sums gradients over ranks: only the last of a step needs to."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def scale_gradients(model: Any, factor: float) -> None:
    """Every gradient becomes its sum over ranks times `factor`, after the last backward of a step (collective when encoders are
    replicated)."""
    _average_replicated(model)
    num_ranks = dist.get_world_size() if isinstance(model, FSDPModule) else 1
    _scale(model, factor * num_ranks)  # FSDP2 leaves means


def _average_replicated(model: Any) -> None:
    """The gradients of what every rank holds whole become their mean over ranks, as FSDP2 makes those of the rest."""
    trained = [p for p in model.parameters() if p in _replicated.get(model, ()) and p.requires_grad]
    for start in range(0, len(trained), _BUCKET_TENSORS):
        bucket = trained[start : start + _BUCKET_TENSORS]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = mean.view_as(parameter)


def _scale(model: Any, factor: float) -> None:
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_grad_norm(model: Any, max_norm: float) -> float:
    """The norm of the whole gradient, which is then scaled down to `max_norm` if it is greater (collective when sharded).

    A norm that is not finite is returned, and the gradient left as it is: such a step must not be taken.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return 0.0
    shards = [_local(g) for g in gradients if isinstance(g, DTensor)]
    square = _square_norm([g for g in gradients if not isinstance(g, DTensor)], gradients[0].device)
    mesh = next((g.device_mesh for g in gradients if isinstance(g, DTensor)), None)
    if mesh is not None:
        shared = _square_norm(shards, gradients[0].device)
        dist.all_reduce(shared, group=mesh.get_group())
        square += shared
    norm = float(square.sqrt())
    if max_norm < norm < float("inf"):
        _scale(model, max_norm / norm)
    return norm


def _square_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).square()


def discard_gradients(model: Any) -> None:
    """Forget all gradients, also what FSDP2 holds back between `set_sync(model, False)` and the last backward."""
    drop_copies(model)
    for parameter in model.parameters():
        parameter.grad = None
    for unit in _units(model):
        group = unit._get_fsdp_state()._fsdp_param_group
        for held in group.fsdp_params if group is not None else ():
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None


# ---- whole tensors ------------------------------------------------------------------------------------------------------


def full_tensors(
    model: Any, dtype: str | None = None, *, beside: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name on disk, whole tensor), one group of tensors at a time; cast to `dtype` before they are gathered, but for what
    transformers keeps in float32.

    Collective when sharded: every rank iterates to the end. Without a cast the tensors of an unsharded model are its own. Which
    tensors these are is looked up in the call, so that a forward of an unsharded model may run while they are iterated; of a
    sharded one too with `beside`, a gloo group of all ranks that nothing else uses meanwhile: shards then go through host
    memory, and only its first rank gets tensors. Without, they are gathered by the group that forwards use.
    """
    drop_copies(model)
    memory, kept = memory_tensors(model), kept_in_float32(model)
    target = getattr(torch, dtype) if dtype is not None else None
    return _gathered(model, memory, {name: None if name in kept else target for name in memory}, beside)


def _gathered(
    model: Any,
    memory: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.dtype | None],
    beside: dist.ProcessGroup | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    for group in disk_groups(model):
        if beside is None:
            whole = {name: _whole(memory[name], targets[name]) for name in group.sources}
            yield from to_disk(model, group, whole).items()
            continue
        found = {name: _to_first(memory[name], targets[name], beside) for name in group.sources}
        if dist.get_rank(beside) == 0:
            yield from to_disk(model, group, found).items()


def _to_first(tensor: torch.Tensor, dtype: torch.dtype | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole tensor on the group's first rank, gathered as bytes through host memory; of no use on the others."""
    cast = _cast(tensor, dtype)
    if not isinstance(cast, DTensor):
        return cast
    if [placement.is_shard(0) for placement in cast.placements] != [True]:
        raise AssertionError(f"a parameter must be cut along its first dimension, got {cast.placements}")
    num_ranks, (num_rows, *rest) = dist.get_world_size(group), cast.shape
    rows = -(-num_rows // num_ranks)  # of each rank, as FSDP2 cuts them; the last ones have fewer
    mine = torch.empty(rows, *rest, dtype=cast.dtype)
    local = cast.to_local()
    mine[: len(local)] = local
    whole = mine.new_empty(num_ranks * rows, *rest) if dist.get_rank(group) == 0 else None
    parts = None if whole is None else list(_bytes(whole).chunk(num_ranks))
    dist.gather(_bytes(mine), parts, group=group, group_dst=0)
    return mine if whole is None else whole[:num_rows]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def drop_copies(model: Any) -> None:
    """Free what FSDP2 gathered, so that the model's parameters are the shards again, and the next forward gathers anew.

    FSDP2 keeps the root's copies from a forward to its backward, in place of the shards: also when no backward comes.
    """
    for unit in _units(model):
        unit.reshard()


def _whole(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = _cast(tensor, dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _units(model: Any) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


# ---- forward of a unit --------------------------------------------------------------------------------------------------


def _recomputed(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that keeps its inputs only, and runs again in the backward."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=the_same_way, **kwargs)
        return forward(*args, **kwargs)

    return run
