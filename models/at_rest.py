"""Tensors at rest: their bytes leave their device for host memory, and come back to it.

Owns the two copies, and the host memory, which is pinned beside an accelerator and kept for the next time. Does not own which
tensors rest (`roles/training/backend.py`) or when (`roles/actor.py`).

    at_rest = AtRest()
    at_rest.leave(tensors)        # the device's memory is free, for other processes too
    at_rest.come_back()           # in new memory of the device, bit by bit as they were

Invariant: a tensor stays the same object, and those that share memory share it at rest and after it. At rest they are read as
any tensor of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rondo.models.units import drop_copies, sharded_units


class AtRest:
    """One set of tensors, in the same order each time. On any thread, one call at a time."""

    def __init__(self) -> None:
        self._hosts: dict[int, torch.Tensor] = {}  # place in the order -> uint8
        self._away: list[tuple[torch.device, torch.Tensor, list[torch.Tensor]]] = []

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Plain tensors of one device; nothing where they rest already."""
        if self._away:
            return
        alike: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                alike.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        for place, sharing in enumerate(alike.values()):
            block = torch.empty(0, dtype=torch.uint8, device=sharing[0].device).set_(sharing[0].untyped_storage())
            host = self._hosts.get(place)
            if host is None or host.numel() != block.numel():
                host = torch.empty(block.numel(), dtype=torch.uint8, pin_memory=block.is_cuda)
                self._hosts[place] = host
            host.copy_(block, non_blocking=True)
            self._away.append((block.device, host, sharing))
        self._settle()
        for _, host, sharing in self._away:
            _lie_in(host, sharing)
        if any(device.type == "cuda" for device, _, _ in self._away):
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Nothing where they do not rest."""
        for device, host, sharing in self._away:
            _lie_in(torch.empty_like(host, device=device).copy_(host, non_blocking=True), sharing)
        self._settle()
        self._away.clear()

    def _settle(self) -> None:
        """What was copied without waiting is there."""
        for device in {device for device, _, _ in self._away if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()


def resident(model: Any) -> Iterator[torch.Tensor]:
    """What a model's parameters lie in on this rank, between two forwards: of what FSDP2 has cut, also the padded shards that it
    gathers from."""
    drop_copies(model)
    for unit in sharded_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            yield from (held._sharded_param_data for held in group.fsdp_params)
    yield from map(own_part, model.parameters())


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded: the very tensor that it lies in."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _lie_in(block: torch.Tensor, sharing: Iterable[torch.Tensor]) -> None:
    """The tensors, which shared other memory with the same contents, share this one."""
    for tensor in sharing:
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=block.device).set_(block.untyped_storage(), *place)
