"""What is done to the gradients of a model, however it is cut: summed over ranks, scaled, clipped, forgotten.

Owns the one norm over all of them. Does not own how a model is cut (`sharding.py`) nor the step (`models/optimizer.py`).

FSDP2 leaves means over the ranks that it gathers a parameter from. Those are all ranks of the mesh, but for experts that lie
apart: each of the ranks that share them out has summed, for its own ones, the gradients of the tokens of all of those ranks.

Invariant: after `scale_gradients` a gradient is the sum over ranks times the factor, however the step is cut into ranks and
micro-batches, and wherever a parameter lies.

    for each micro-batch: set_last(model, last); loss.backward()
    scale_gradients(model, 1 / count); norm = clip_grad_norm(model, 1.0)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rondo.models.mesh import EXPERTS
from rondo.models.names import local_part
from rondo.models.units import drop_copies, sharded_units

_BUCKET_TENSORS = 64


def set_last(model: Any, last: bool) -> None:
    """Whether the next backward is the last of an update: each sums the gradients of a copy's ranks into their shards, the last
    one sums those of all copies."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


def scale_gradients(model: Any, factor: float) -> None:
    """Every gradient becomes its sum over ranks times `factor`, after the last backward of a step (collective when encoders are
    replicated)."""
    _average_replicated(model)
    alike: dict[int, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            alike.setdefault(_num_averaged(model, parameter.grad), []).append(local_part(parameter.grad))
    for num_ranks, gradients in alike.items():
        torch._foreach_mul_(gradients, factor * num_ranks)


def _num_averaged(model: Any, gradient: torch.Tensor) -> int:
    """Over how many ranks' sums a gradient is the mean."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if isinstance(model, FSDPModule) else 1
    mesh = gradient.device_mesh
    names = mesh.mesh_dim_names or ()
    return mesh.size() // (mesh.size(names.index(EXPERTS)) if EXPERTS in names else 1)


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
            for dimension in (d for d, placement in enumerate(placements) if not placement.is_replicate()):
                dist.all_reduce(part, group=mesh.get_group(dimension))
        square += part
    norm = float(square.sqrt())
    if max_norm < norm < float("inf"):
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], max_norm / norm)
    return norm


def discard_gradients(model: Any) -> None:
    """Forget all gradients, also what FSDP2 holds back between `set_last(model, False)` and the last backward."""
    drop_copies(model)
    for parameter in model.parameters():
        parameter.grad = None
    for unit in sharded_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group._partial_reduce_output = None
