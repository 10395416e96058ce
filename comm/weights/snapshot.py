"""The hot snapshot of one rank: its newest two versions in memory that outlives it.

Owns which of the two slots of a slab (`slab.py`) is replaced; each holds shard, optimizer and JSON-able state. Does not own
which version counts: a restart reads the newest one that the coordinator committed, which every rank holds.

    hot = HotSnapshot(segment)
    hot.write(5, {"model.norm.weight": shard, "exp_avg.model.norm.weight": moment}, {"schedule": 5, "seed": 7})
    hot.versions()          # (4, 5)
    tensors, state = hot.read(5)

Invariant: a process killed while it writes leaves the other version as it was. `write(v)` never replaces the newest version
below `v`: that one is committed, or it is what a restart falls back to. A slot that holds `v` itself, or a later version that a
restart forgot, goes first.

Only the manifest carries a checksum. Summing 16 bytes a parameter takes longer than copying them, in every step,
against bits that no process but this one can change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.runtime.memory.segments import Segment

_NUM_SLOTS = 2
_LEAST_BYTES = slab_bytes(0, 0, _NUM_SLOTS)


def snapshot_bytes(total_tensor_bytes: int, num_tensors: int, state_bytes: int = 1024 * 1024) -> int:
    """The segment that holds two versions of `num_tensors` tensors and a state of `state_bytes` as JSON."""
    return slab_bytes(total_tensor_bytes + state_bytes, num_tensors, _NUM_SLOTS)


class HotSnapshot:
    """Two slots in `segment`. One process at a time writes; its successor, after its proved death, reads."""

    def __init__(self, segment: Segment) -> None:
        if segment.num_bytes < _LEAST_BYTES:
            raise ValueError(
                f"a snapshot's segment must have at least {_LEAST_BYTES} bytes, got {segment.num_bytes}. "
                "Size it with snapshot_bytes."
            )
        self._slab = WeightSlab(segment, _NUM_SLOTS)

    def write(
        self, version: int, tensors: Mapping[str, torch.Tensor], state: dict[str, Any], *, checksum: int | None = None
    ) -> None:
        """Copy a version in (tensors of any dtype, device and strides). `checksum`: what its owner proves it by.

        Raises OutOfSpace when it is larger than a slot; the version below is there all the same.
        """
        held = {slot: held for held, (slot, _) in self._slab.complete().items()}
        slot = min(range(_NUM_SLOTS), key=lambda slot: _worth(held.get(slot), version))
        writer = self._slab.write(slot, attempt=0, version=version)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish([], extra={"state": state, "checksum": checksum})
        if held.get(1 - slot) == version:
            self._slab.clear(1 - slot)

    def read(self, version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Copies of the tensors of `version`, in the order they were written, and its state. Raises as `views`."""
        tensors, state = self.views(version)
        return {name: tensor.clone() for name, tensor in tensors.items()}, state

    def views(self, version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The same where they lie, until `version + 2` is written.

        Raises KeyError when the snapshot does not hold it, CorruptData when its manifest is damaged.
        """
        block, manifest = self._held(version)
        return manifest.views(block), manifest.more["state"]

    def checksum(self, version: int) -> int | None:
        """What was told of it when it was written. Raises as `views`."""
        found: int | None = self._held(version)[1].more.get("checksum")
        return found

    def _held(self, version: int) -> tuple[Any, Any]:
        held = self._slab.complete()
        if version not in held:
            raise KeyError(f"version {version} must be in the hot snapshot, which holds {self.versions() or 'none'}.")
        slot, checksum = held[version]
        return self._slab.contents(slot, attempt=0, version=version, checksum=checksum, summed=False)

    def versions(self) -> tuple[int, ...]:
        """The versions that can be read, oldest first."""
        return tuple(sorted(self._slab.complete()))

    def close(self) -> None:
        """Let go of the segment, so that it can be closed."""
        self._slab.close()


def _worth(held: int | None, version: int) -> tuple[int, int]:
    """How much a slot is worth keeping while `version` is written; the least is replaced, `None` is free or
    half-written."""
    if held is None:
        return (0, 0)
    if held == version:
        return (1, 0)
    return (2, -held) if held > version else (3, held)
