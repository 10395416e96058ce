"""One version written into a slot by all ranks that have parts of it: each copies its own, and none gathers.

Owns who copies and who sums what, and when all of it is there. Does not own which rank has what (an iterator of named tensors,
`models/published.py`), the slot (`slab.py`), or when the version counts (`publication.py`).

    rank 0    begins the slot, tells it | its rows of every tensor | all meet | sums of half of the buckets | completes the slot
    rank 1                              | its rows of every tensor |          | sums of the other half      |

Every rank lays out the same names, shapes and dtypes, so it knows where its bytes belong. Sums are made of what lies in the slot.
Readers are told of every stretch of buckets that is whole, and sum it meanwhile.

Invariant: the first rank completes the slot, and does so after every rank has said that its bytes lie there. Where one fails or
dies before, the slot stays half-written, and the collectives of the others fail.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rondo.comm.weights.manifest import BUCKET_BYTES
from rondo.comm.weights.slab import SlotWriter, WeightSlab
from rondo.comm.weights.sums import bucket_sum
from rondo.runtime.memory.to_host import to_host

_STRETCH_BUCKETS = 16
"""How many are written from one meeting of the ranks to the next: 256 MiB, copied in longer than ranks take to meet."""


Tensors = Iterable[tuple[str, torch.Tensor]]
"""The same names, shapes and dtypes in the same order on every rank. A DTensor is cut along its first dimension, and each rank
has its rows; any other is whole on one rank, and on the meta device elsewhere."""


def first_part(
    writer: SlotWriter, slot: int, tensors: Tensors, bucket_bytes: int, group: dist.ProcessGroup
) -> list[int]:
    """The part of the group's first rank, which has begun `slot` with `writer`: the sums of all its buckets, for `finish`
    (collective). Raises what `tensors` and `SlotWriter.place` raise."""
    dist.broadcast(torch.tensor([slot]), group=group, group_src=0)
    return _copy_and_sum(writer, tensors, bucket_bytes, group)


def other_part(
    slab: WeightSlab,
    tensors: Tensors,
    group: dist.ProcessGroup,
    *,
    attempt: int,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """The part of every other rank of the group, in the slot that the first one names (collective). Raises as `first_part`."""
    slot = torch.empty(1, dtype=torch.int64)
    dist.broadcast(slot, group=group, group_src=0)
    writer = slab.join(int(slot), attempt=attempt, version=version, bucket_bytes=bucket_bytes)
    _copy_and_sum(writer, tensors, bucket_bytes, group)


def _copy_and_sum(writer: SlotWriter, tensors: Tensors, bucket_bytes: int, group: dist.ProcessGroup) -> list[int]:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sums: list[int] = []
    at = end = 0

    def whole(until: int) -> None:
        nonlocal at
        dist.barrier(group)
        if rank == 0:
            writer.whole(until)
        starts = range(at, until, bucket_bytes)
        mine = range(len(starts) * rank // num_ranks, len(starts) * (rank + 1) // num_ranks)
        for index, start in enumerate(starts):
            sums.append(bucket_sum(writer.block[start : min(start + bucket_bytes, until)]) if index in mine else 0)
        at = until

    for name, tensor in tensors:
        begins, end = writer.place(name, tensor)
        _copy(tensor, torch.from_numpy(writer.block[begins:end]))
        if end - at >= _STRETCH_BUCKETS * bucket_bytes:
            whole(end // bucket_bytes * bucket_bytes)
    whole(end)
    joined = torch.tensor(sums, dtype=torch.int64)
    dist.all_reduce(joined, group=group)
    return [int(each) for each in joined.tolist()]


def _copy(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """What this rank has of a tensor, to where it belongs among its bytes."""
    if tensor.is_meta or not tensor.numel():
        return
    place, mine = into.view(tensor.dtype).view(tensor.shape), tensor.detach()
    if isinstance(mine, DTensor):
        shape, start = compute_local_shape_and_global_offset(mine.shape, mine.device_mesh, mine.placements)
        if any(start[1:]) or shape[1:] != tensor.shape[1:]:
            raise AssertionError(f"a tensor must be cut along its first dimension alone, got {mine.placements}")
        place, mine = place[start[0] : start[0] + shape[0]], mine.to_local()
    to_host(place, mine)
