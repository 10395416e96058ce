"""Publication: a version is copied into a slot of the slab, and summed, between two training steps.

Owns that a version counts when all of it lies there. Does not own the slab's slots (the coordinator lends one), who has which
part of the weights (an iterator of named tensors), copying (`copying.py`, or `together.py` where several ranks have parts),
telling anybody, nor sending it on, which may go on beside the next step: a slot stays as it is until it is lent again.

    trainer's thread      copy, sum | next step's rounds .................. | optimizer changes weights
    a thread beside it    copy, sum | send on |

Invariant: when `publish` returns, the slot is complete, so the optimizer may change the weights.

    id = publish(slab, slot, attempt=0, version=5, tensors=trainer.weights())      # on the trainer's thread
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from rondo.comm.weights.copying import copy_and_sum
from rondo.comm.weights.held import VersionId
from rondo.comm.weights.manifest import BUCKET_BYTES
from rondo.comm.weights.slab import WeightSlab
from rondo.comm.weights.together import first_part


def publish(
    slab: WeightSlab,
    slot: int,
    *,
    attempt: int,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int = BUCKET_BYTES,
    num_threads: int = 2,
    beside: dist.ProcessGroup | None = None,
) -> VersionId:
    """Copy `tensors` into `slot`, which the coordinator lent; `num_threads`, the calling one among them, copy and sum.

    `beside`: a gloo group of all ranks that have parts of the tensors, this one its first; nothing else uses it meanwhile, and
    the other ranks do their `other_part` (collective). Raises what `tensors` and the slab raise; the slot stays half-written
    then, and is served to nobody.
    """
    writer = slab.write(slot, attempt=attempt, version=version, bucket_bytes=bucket_bytes)
    if beside is None:
        sums = copy_and_sum(writer, tensors, bucket_bytes, num_threads)
    else:
        sums = first_part(writer, slot, tensors, bucket_bytes, beside)
    return VersionId(attempt, version, writer.finish(sums))
