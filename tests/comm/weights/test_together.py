"""One version written by three real processes, each its own part, against the same version written by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rondo.comm.weights import together
from rondo.comm.weights.publication import publish as publish_parts
from rondo.comm.weights.slab import WeightSlab
from rondo.runtime.errors import CorruptData
from tests.comm.memory import MemorySegment
from tests.comm.weights.versions import Gloo, new_slab, publish, run_worlds, weights

NUM_RANKS, BUCKET_BYTES = 3, 1024
CUT = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "flag", "two")
"""Of `flag` each rank has a row; of `two` the last rank has none."""


def version() -> dict[str, torch.Tensor]:
    return weights(5) | {"two": torch.ones(2, 3), "turned": torch.arange(12.0).view(3, 4).T}


def parts(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for number, (name, tensor) in enumerate(version().items()):
        if name in CUT:
            yield name, distribute_tensor(tensor, mesh, [Shard(0)])
        else:
            yield name, tensor if number % NUM_RANKS == rank else torch.empty_like(tensor, device="meta")


def write(comm: Gloo, path: str, stretch: int, killed: int | None) -> Any:
    """The checksum on the first rank; what reading gives where rank `killed` ends in the middle."""
    together._STRETCH_BUCKETS = stretch

    def mine() -> Iterator[tuple[str, torch.Tensor]]:
        for number, each in enumerate(parts(comm.rank)):
            if number == 3 and comm.rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            yield each

    with Path(path).open("r+b") as memory:
        slab = WeightSlab(MemorySegment(fd=memory.fileno()), 2)
    group = dist.group.WORLD
    assert group is not None
    try:
        if comm.rank > 0:
            return together.other_part(slab, mine(), group, attempt=0, version=5, bucket_bytes=BUCKET_BYTES)
        return publish_parts(
            slab, 1, attempt=0, version=5, tensors=mine(), bucket_bytes=BUCKET_BYTES, beside=group
        ).checksum
    except RuntimeError as error:  # gloo's
        return type(error).__name__


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[WeightSlab, list[Any]]]:
    """What each rank gave, and the slab that they wrote."""
    folder = tmp_path_factory.mktemp("together")
    cases = {"at once": (1000, None), "in stretches": (2, None), "killed": (1000, 1), "killed late": (2, 2)}
    for name in cases:
        (folder / name).write_bytes(bytes(1 << 19))
    scenarios = [["write", NUM_RANKS, str(folder / name), *case] for name, case in cases.items()]
    told = run_worlds("tests.comm.weights.test_together", scenarios, folder)
    slabs = {}
    for name, ranks in zip(cases, told, strict=True):
        with (folder / name).open("r+b") as memory:
            slabs[name] = WeightSlab(MemorySegment(fd=memory.fileno()), 2), ranks
    return slabs


@pytest.mark.parametrize("case", ["at once", "in stretches"])
def test_several_ranks_write_the_version_that_one_writes(found: dict[str, Any], case: str) -> None:
    slab, (checksum, *others) = found[case]
    alone = WeightSlab(MemorySegment(1 << 19), 1)
    by_one = publish_parts(alone, 0, attempt=0, version=5, tensors=version().items(), bucket_bytes=BUCKET_BYTES)
    assert checksum == by_one.checksum
    assert others == [None, None] and slab.complete() == {5: (1, checksum)}
    tensors = slab.read(1, attempt=0, version=5, checksum=checksum)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in version().items())


@pytest.mark.parametrize("case", ["killed", "killed late"])
def test_a_version_of_which_a_rank_dies_is_never_served_and_the_others_are_told(
    found: dict[str, Any], case: str
) -> None:
    slab, ranks = found[case]
    assert sorted(map(str, ranks)) == ["None", "RuntimeError", "RuntimeError"] and slab.complete() == {}
    with pytest.raises(CorruptData, match="must be complete, got half-written"):
        slab.read(1, attempt=0, version=5, checksum=0)


def test_a_part_is_written_only_of_the_version_that_was_begun() -> None:
    slab = new_slab()
    publish(slab, 0, 4)
    slab.write(1, attempt=0, version=5)
    slab.join(1, attempt=0, version=5)
    for slot, number in ((0, 4), (1, 4), (2, 5)):
        with pytest.raises(CorruptData, match="must be half-written with version"):
            slab.join(slot, attempt=0, version=number)
