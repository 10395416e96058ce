"""Experts that lie apart: neighbouring ranks share out the experts of a layer, and tokens go to them and come back.

Owns which parameters are experts', how they are cut, and their forward and backward, over ranks or, where they have adapters, in
one piece. Does not own the ranks (`models/mesh.py`), the routers, which run where the tokens are (`models/routing.py` replays
them as ever), adapters (`models/lora.py`), nor FSDP2, which cuts each rank's experts once more over the ranks that have the same
ones, and gathers them with their layer (`sharding.py`).

    rank 0 (experts 0 1)                     rank 1 (experts 2 3)
    tokens a b, each to two experts          tokens c d
    a0 b1 a2 b3   by expert                  c0 d0 c1 d3
    a0 b1 | a2 b3   ----- all-to-all -----   c0 d0 c1 | d3
    a0 c0 d0, b1 c1   by own expert          a2, b3 d3        one grouped product for gate and up, one for down
    ... and all the way back, to be weighed and summed in their token's place

What a layer costs, of N tokens with K experts each: two all-to-alls in a forward and two in its backward, each of N K H numbers
in the dtype of the computation, of which (ep - 1) / ep leave the rank; and one copy to the host, which waits for the device: how
many rows go to and come from each rank. All else is worked out on the device, and a backward knows it already. A layer that is
computed again exchanges and waits once more.

A token with several experts on one rank goes there once for each of them. To send it once, and bring back one weighed sum, would
spare a third of the rows over 8 ranks and a sixth over 16, of 8 experts a token among 128, for sums at the experts, which in
bfloat16 are rounded once more than those of a model in one piece. To let half of the tokens travel while others are multiplied
would make the gradient of an expert out of two that are rounded each: in bfloat16 a step goes a third further from the exact one.

Invariants: every rank takes part in every exchange and has a gradient for each of its experts, also without a token for any of
them. A token's sum is the one of a model in one piece: the same numbers in the same order.

Legend: N tokens of this rank, K experts of a token, H hidden size, S = N K pairs, R rows that come here, E experts, P ranks that
share them out, L = E / P experts of one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import _grouped_linear

from rondo.models.mesh import EXPERT_SHARD, EXPERTS, REPLICATE, Mesh
from rondo.models.names import local_part, own_slices
from rondo.runtime.errors import ConfigError

IMBALANCE = 1.25
"""What a rank is taken to get at most of all routes, over its part of them, where memory is traced: over many experts of a rank,
routers that were trained with a load-balancing loss stay below it."""
Placed = Callable[[nn.Parameter], ShardPlacementResult | None]
"""How FSDP2 cuts a parameter, where it is not as all others."""


def experts_of(model: Any) -> dict[str, Any]:
    """Name -> module with the experts of a layer, in one tensor each of transformers' kinds [E, ...]."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def spread(model: Any, mesh: Mesh) -> Placed | None:
    """Share out the experts of `model`, whole or on the meta device, over `mesh`; in place. What FSDP2 is to be told of them;
    None where `ep` is 1. Raises ConfigError for a model whose experts cannot be."""
    if mesh.experts is None:
        return None
    ep = mesh.experts[EXPERTS]
    check_experts(model, ep.size())
    for module in experts_of(model).values():
        for name, parameter in module.named_parameters(recurse=False):
            part = distribute_tensor(parameter, ep, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        module.forward = functools.partial(_forward, module, ep.get_group())
    # The ranks that FSDP2 cuts a rank's experts over, and with several copies sums their gradients over.
    over = FSDPMeshInfo(mesh.experts[EXPERT_SHARD], shard_mesh_dim=0)
    if mesh.experts.size(0) > 1:
        over = HSDPMeshInfo(mesh.experts[REPLICATE, EXPERT_SHARD], shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda parameter: ShardPlacementResult(Shard(0), over) if isinstance(parameter, DTensor) else None


def check_experts(model: Any, ep: int) -> None:
    """ConfigError where the experts of `model`, with or without memory, cannot be shared out over `ep` ranks."""
    if not (found := experts_of(model)):
        raise ConfigError(
            f"train.mesh.ep must be 1 for a model without experts, got {ep} with {type(model).__name__}. Remove it"
        )
    for name, module in found.items():
        if module.num_experts % ep:
            raise ConfigError(
                f"train.mesh.ep must divide the experts of a layer, got {ep} with {module.num_experts} in {name}. Change it"
            )
        if module.has_bias or module.has_post_expert_norm or not module.has_gate:
            raise ConfigError(
                f"train.mesh.ep must be 1 for experts that are more than two products and a gate, got {ep} with "
                f"{type(module).__name__}. Remove it"
            )


# ---- a forward ----------------------------------------------------------------------------------------------------------


def stay_outside_of_graphs(model: Any) -> None:
    """What torch.compile makes of a layer calls its experts as they are: how many rows come is not known before."""
    for module in experts_of(model).values():
        if "forward" in vars(module):
            module.forward = torch.compiler.disable(module.forward)


def _forward(
    experts: Any, group: dist.ProcessGroup, hidden_NH: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """In the place of the experts' own: [N, H]. Collective over `group`."""
    num_chosen, num_local = chosen_NK.shape[1], experts.num_experts // group.size()
    chosen_S, order_S = chosen_NK.flatten().sort(stable=True)
    ids_E = torch.arange(experts.num_experts, device=chosen_S.device)
    ends_E = torch.searchsorted(chosen_S, ids_E, right=True)
    sent_PL = ends_E.diff(prepend=ends_E.new_zeros(1)).view(-1, num_local)
    came_PL = _exchanged(sent_PL, [1] * group.size(), [1] * group.size(), group)
    sent, came = _counts(sent_PL, came_PL, len(chosen_S))

    rows_RH = _Exchange.apply(_Pick.apply(hidden_NH, order_S, num_chosen), sent, came, group)
    own_R = ids_E[:num_local].repeat(group.size()).repeat_interleave(came_PL.flatten(), output_size=sum(came))
    order_R = own_R.argsort(stable=True)
    ends_L = came_PL.sum(0).cumsum(0).to(torch.int32)
    rows_RH = _products(experts, _Pick.apply(rows_RH, order_R, 1), ends_L)
    back_SH = _Exchange.apply(_Pick.apply(rows_RH, _inverse(order_R), 1), came, sent, group)
    return _weighed(back_SH, order_S, weights_NK).to(hidden_NH.dtype)


def in_one_piece(
    experts: Any, hidden_NH: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """The same where all experts are here, with their adapters: [N, H]."""
    chosen_S, order_S = chosen_NK.flatten().sort(stable=True)
    ids_E = torch.arange(experts.num_experts, device=chosen_S.device)
    ends_E = torch.searchsorted(chosen_S, ids_E, right=True).to(torch.int32)
    rows_SH = _products(experts, _Pick.apply(hidden_NH, order_S, chosen_NK.shape[1]), ends_E)
    return _weighed(rows_SH, order_S, weights_NK).to(hidden_NH.dtype)


def _weighed(rows_SH: torch.Tensor, order_S: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """[N, H]: what experts made of a token, in its place."""
    found_SH = _Pick.apply(rows_SH, _inverse(order_S), 1)
    return (found_SH.view(*weights_NK.shape, found_SH.shape[1]) * weights_NK[..., None]).sum(1)


def _products(experts: Any, rows_RH: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
    """[R, H]: of rows that lie expert by expert. By groups in one kernel, or one by one where transformers finds none."""
    num_rows = len(rows_RH)
    if not num_rows:  # a row of zeros, so that there is a gradient
        rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
        ends_L = torch.cat([ends_L[:-1], torch.ones_like(ends_L[-1:])])
    rows = _product(experts, "gate_up_proj", rows_RH, ends_L)
    return _product(experts, "down_proj", experts._apply_gate(rows), ends_L)[:num_rows]


def _product(experts: Any, name: str, rows_RX: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
    """With one weight of the experts that are here, and its adapter where it has one."""
    weight, adapter = getattr(experts, name), getattr(experts, f"{name}_adapter", None)
    found = _grouped_linear(rows_RX, local_part(weight), ends_L, is_transposed=experts.is_transposed)
    return found if adapter is None else adapter(found, rows_RX, ends_L, own_slices(weight, weight)[:1])


def _counts(sent_PL: torch.Tensor, came_PL: torch.Tensor, num_pairs: int) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and come from it: the one copy to the host. Of tensors without memory, those of the fullest
    rank."""
    if isinstance(sent_PL, FakeTensor):
        return expected(num_pairs, len(sent_PL))
    sent, came = torch.stack([sent_PL.sum(1), came_PL.sum(1)]).tolist()
    return sent, came


def expected(num_pairs: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """How many of its rows a rank sends to each, and how many come from each, where routers send `IMBALANCE` times its part to
    this one, and all ranks have as many tokens."""
    came = [min(num_pairs, math.ceil(IMBALANCE * num_pairs / num_ranks))] * num_ranks
    each, more = divmod(num_pairs, num_ranks)
    return [each + (rank < more) for rank in range(num_ranks)], came


class _Exchange(torch.autograd.Function):
    """Rows that lie rank by rank go there; those for this rank come, sender by sender."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.how = sent, came, group
        return _exchanged(rows, sent, came, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, came, group = ctx.how
        return _exchanged(gradient, came, sent, group), None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    found = rows.new_empty(sum(came), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), came, sent, group=group)
    return found


class _Pick(torch.autograd.Function):
    """`rows`, each `times` over, in another order: its gradient is picked and summed too, where torch's own would add them up one
    by one."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.times = times
        return rows[order // times if times > 1 else order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        picked = gradient[_inverse(order)]
        return picked.view(-1, ctx.times, gradient.shape[1]).sum(1) if ctx.times > 1 else picked, None, None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
