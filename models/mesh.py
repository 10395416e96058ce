"""The ranks of a training group, by named dimensions.

Owns the shape (`train.mesh`), the DeviceMesh over it, and groups of ranks for what runs beside training. Sharding, clipping,
publication and checkpoints take from here, or from the placements of the tensors that were sharded over it, what they need: none
of them assumes one axis. Does not own what is sharded how (`parallel/`).

    dp_replicate  copies of the model, each on `dp_shard` ranks; gradients are summed over them once an update
    dp_shard      the ranks of one copy: parameters, gradients and moments are cut over them
    ep            of a mixture of experts: neighbours among the ranks of a copy, which share out the experts of a layer
    efsdp         the ranks of a copy that have the same of them: an expert's parameters are cut over these, dp_shard / ep

    4 ranks as 2 x 2:    0 1    a copy           4 ranks as one copy with ep 2:    0 1    all experts
                         2 3    another                                            2 3    once more: 0 and 2 have the same ones

`ep` lies within a copy, so that its ranks hold a whole model together, which they publish and save; and neighbours share them
out, which are on one node wherever `ep` divides its devices, for tokens travel with every layer.

Invariant: every rank trains on rows of its own; ranks are numbered copy by copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondo.models.config import MeshConfig

REPLICATE, SHARD = "dp_replicate", "dp_shard"
EXPERT_SHARD, EXPERTS = "efsdp", "ep"


@dataclass(frozen=True, slots=True)
class Mesh:
    """`ranks`: [dp_replicate, dp_shard]; None for one process, which has no groups. `experts`: the same ranks as
    [dp_replicate, efsdp, ep]; None where `ep` is 1."""

    ranks: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @classmethod
    def open(cls, config: MeshConfig, world_size: int, device: str = "cpu") -> Mesh:
        """Of all ranks of this process's torchrun (collective). ConfigError for a shape that is not theirs."""
        copies, shard = config.shape(world_size)
        if world_size == 1:
            return cls()
        kind = device.partition(":")[0]
        ranks = init_device_mesh(kind, (copies, shard), mesh_dim_names=(REPLICATE, SHARD))
        if config.ep == 1:
            return cls(ranks)
        apart = (copies, shard // config.ep, config.ep)
        return cls(ranks, init_device_mesh(kind, apart, mesh_dim_names=(REPLICATE, EXPERT_SHARD, EXPERTS)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.ranks is None else self.ranks.size()

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else dist.get_rank()

    @property
    def replica(self) -> int:
        """Which copy this rank has a shard of."""
        return 0 if self.ranks is None else self.ranks.get_local_rank(REPLICATE)

    @property
    def sharded_over(self) -> DeviceMesh | None:
        """What FSDP2 cuts a model over: one dimension, or with several copies both."""
        return None if self.ranks is None else self.ranks if self.ranks.size(0) > 1 else self.ranks[SHARD]

    def most(self, *values: int) -> list[int]:
        """The greatest of each over the ranks (collective)."""
        if self.ranks is None:
            return list(values)
        found = torch.tensor(values, device=self.ranks.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [int(value) for value in found.tolist()]

    def all_beside(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks that nothing else uses (collective)."""
        return None if self.ranks is None else dist.new_group(backend="gloo")

    def copy_beside(self) -> dist.ProcessGroup | None:
        """The same of the ranks that hold this rank's copy; None where each holds one."""
        if self.ranks is None or self.ranks.size(1) == 1:
            return None
        mine, _ = dist.new_subgroups_by_enumeration(self.ranks.mesh.tolist(), backend="gloo")
        return mine
