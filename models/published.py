"""The weights of a model as they leave it: under their names on disk, and of each what this rank gives.

Owns which rank of a copy gives what of a version that is published, so that together they give all of it once, and none gathers
it: of what is cut every rank gives its rows, or the tensors that its rows become on disk (those of its experts); of what all hold
whole, and of what is converted otherwise, which is gathered for that, one rank gives everything, each in its turn. And who gives
all of what is written by one process: the first rank, to which the others send their rows. Does not own names and conversions
(`names.py`), nor where it is written (`comm/weights/together.py`, `checkpoint.py`).

    a DTensor    every rank gives its rows of it
    on meta      another rank gives it
    else         this rank gives all of it

Invariant: names, shapes, dtypes and their order are the same on every rank. What is gathered is the tensors of one conversion at
a time, and lies on the rank that gives it alone.

    for name, tensor in own_weights(model, "bfloat16", beside=group): ...
    for name, tensor in weights_on_first(model, "bfloat16", beside=group): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.models.lora import Pair, pairs, published_adapter
from rondo.models.names import (
    Group,
    disk_dtypes,
    disk_groups,
    local_part,
    memory_tensors,
    own_slices,
    rows_by_rank,
    rows_to_disk,
    to_disk,
)
from rondo.models.units import drop_copies
from rondo.runtime.memory.to_host import to_host


def own_weights(
    model: Any, dtype: str | None = None, *, beside: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name on disk, what this rank gives of it), cast to `dtype` but for what transformers keeps in float32. A tensor without a
    cast may be the model's own. Adapters are merged into it.

    `beside`: a gloo group of the ranks of a copy that nothing else uses meanwhile (collective: every rank iterates to the end);
    what is gathered goes through host memory. Without, this rank has all. Which tensors these are is looked up in the call, so
    that a forward may run while they are iterated on another thread, but not the optimizer.
    """
    drop_copies(model)
    return _given(model, memory_tensors(model), pairs(model), disk_dtypes(model, dtype), beside, on_first=False)


def own_adapter(
    model: Any, dtype: str | None = None, *, beside: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of its adapters, under their published names: every rank has them whole, and they give them in turns."""
    num_ranks, rank = (1, 0) if beside is None else (dist.get_world_size(beside), dist.get_rank(beside))
    tensors = published_adapter(model, dtype)
    return (
        (name, tensor if number % num_ranks == rank else tensor.to("meta"))
        for number, (name, tensor) in enumerate(tensors.items())
    )


def weights_on_first(
    model: Any, dtype: str | None = None, *, beside: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, but that the first rank of `beside` gives all of each. Of a group of several copies, those beyond the first have
    nothing to do."""
    drop_copies(model)
    return _given(model, memory_tensors(model), pairs(model), disk_dtypes(model, dtype), beside, on_first=True)


def published_shapes(model: Any, dtype: str | None = None) -> dict[str, torch.Tensor]:
    """The same names with tensors without memory."""
    dtypes = disk_dtypes(model, dtype)
    return {name: empty for group in disk_groups(model) for name, empty in _empty(group, dtypes).items()}


def _given(
    model: Any,
    memory: Mapping[str, torch.Tensor],
    added: Mapping[str, Pair],
    dtypes: Mapping[str, torch.dtype],
    beside: dist.ProcessGroup | None,
    *,
    on_first: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    num_ranks, rank = (1, 0) if beside is None else (dist.get_world_size(beside), dist.get_rank(beside))
    for number, group in enumerate(disk_groups(model)):
        cut = num_ranks > 1 and any(isinstance(memory[name], DTensor) for name in group.sources)
        in_rows, giver = cut and group.renamed and not on_first, 0 if on_first else number % num_ranks
        by_row = cut and group.by_row and not on_first
        found = {name: memory[name].detach() for name in group.sources} if cut or giver == rank else {}
        found = {
            name: added[name].merged(tensor, dtypes[name]) if name in added else tensor.to(dtypes[name])
            for name, tensor in found.items()
        }
        if by_row:
            (tensor,) = found.values()
            first, *_ = own_slices(tensor, tensor)
            own = rows_to_disk(model, group, local_part(tensor), first.start, len(tensor))
            yield from (_empty(group, dtypes) | own).items()
            continue
        if cut and not in_rows:
            assert beside is not None
            found = {name: _gathered(tensor, giver, beside) for name, tensor in found.items()}
        elif not in_rows:
            found = {name: local_part(tensor) for name, tensor in found.items()}
        on_disk = to_disk(model, group, found) if in_rows or giver == rank else _empty(group, dtypes)
        yield from ((name, on_disk[name]) for name in group.shapes)


def _empty(group: Group, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    (dtype,) = {dtypes[name] for name in group.sources}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in group.shapes.items()}


def _gathered(tensor: torch.Tensor, to: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole tensor on rank `to` of the group, whose first ranks hold a copy of the model: sent there as bytes through host
    memory. Of no use on the others."""
    if not isinstance(tensor, DTensor):
        return tensor
    local, rank, rows = tensor.to_local(), dist.get_rank(group), rows_by_rank(tensor)
    if rank != to:
        if local.numel() and rank < len(rows):
            mine = torch.empty(local.shape, dtype=local.dtype)
            to_host(mine, local)
            dist.send(_bytes(mine), group=group, group_dst=to)
        return local
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    coming = []
    for sender, (start, end) in enumerate(rows):
        if sender == rank:
            to_host(whole[start:end], local)
        elif end > start:
            coming.append(dist.irecv(_bytes(whole[start:end]), group=group, group_src=sender))
    for each in coming:
        each.wait()
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
