"""The hot snapshot of one rank: its newest two versions in memory that outlives it.

Owns two slots in a segment, each with shard, optimizer and JSON-able state, and which of them is replaced. Does not own
which version counts: a restart reads the newest one that the coordinator committed, which every rank holds.

    hot = HotSnapshot(segment)
    hot.write(5, {"model.norm.weight": shard, "exp_avg.model.norm.weight": moment}, {"schedule": 5, "seed": 7})
    hot.versions()          # (4, 5)
    tensors, state = hot.read(5)

Invariant: a slot's word is cleared before its first byte changes and stored after its last, so a process killed while
it writes leaves the other version as it was. `write(v)` never replaces the newest version below `v`: that one is
committed, or it is what a restart falls back to. A slot that holds `v` itself, or a later version that a restart
forgot, goes first.

Only the manifest carries a checksum. Summing 16 bytes a parameter takes longer than copying them, in every step,
against bits that no process but this one can change.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from rondo.comm.ring.records import ALIGN_BYTES
from rondo.comm.ring.ring import Memory
from rondo.comm.ring.tensors import MANIFEST_BYTES_PER_TENSOR, Packer, manifest_of, unpack
from rondo.comm.ring.words import Words
from rondo.runtime.errors import CorruptData

_NUM_SLOTS = 2
_CONTROL_BYTES = 4096
_NUM_WORDS = 8
_COMPLETE, _MANIFEST_AT, _MANIFEST_BYTES, _MANIFEST_CRC = range(4)  # _COMPLETE is version + 1, 0 while there is none


def snapshot_bytes(total_tensor_bytes: int, num_tensors: int, state_bytes: int = 1024 * 1024) -> int:
    """The segment that holds two versions of `num_tensors` tensors and a state of `state_bytes` as JSON."""
    manifest = 1024 + state_bytes + num_tensors * (MANIFEST_BYTES_PER_TENSOR + ALIGN_BYTES)
    slot = -(-(total_tensor_bytes + manifest) // _CONTROL_BYTES) * _CONTROL_BYTES
    return _CONTROL_BYTES + _NUM_SLOTS * slot


class HotSnapshot:
    """Two slots in `segment`. One process at a time writes; its successor, after its proved death, reads."""

    def __init__(self, segment: Memory) -> None:
        self.capacity_bytes = (segment.num_bytes - _CONTROL_BYTES) // _NUM_SLOTS // _CONTROL_BYTES * _CONTROL_BYTES
        if self.capacity_bytes < _CONTROL_BYTES:
            raise ValueError(
                f"a snapshot's segment must have at least {3 * _CONTROL_BYTES} bytes, got {segment.num_bytes}. "
                "Size it with snapshot_bytes."
            )
        self._view = segment.view(readonly=False)
        self._words = Words(self._view, 0, _NUM_SLOTS * _NUM_WORDS)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Copy a version in (tensors of any dtype, device and strides).

        Raises OutOfSpace when it is larger than a slot; the version below is there all the same.
        """
        slot = self._replaced_by(version)
        self._store(slot, _COMPLETE, 0)
        packer = Packer(self._block(slot))
        for name, tensor in tensors.items():
            packer.add(name, tensor)
        at, num_bytes = packer.finish({"version": version, "state": state})
        self._store(slot, _MANIFEST_AT, at)
        self._store(slot, _MANIFEST_BYTES, num_bytes)
        self._store(slot, _MANIFEST_CRC, zlib.crc32(self._block(slot)[at : at + num_bytes]))
        self._store(slot, _COMPLETE, version + 1)
        if self._load(1 - slot, _COMPLETE) == version + 1:
            self._store(1 - slot, _COMPLETE, 0)

    def read(self, version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Copies of the tensors of `version`, in the order they were written, and its state.

        Raises KeyError when the snapshot does not hold it, CorruptData when its manifest is damaged.
        """
        held = self._held()
        if version not in held:
            raise KeyError(f"version {version} must be in the hot snapshot, which holds {self.versions() or 'none'}.")
        block, slot = self._block(held[version]), held[version]
        at, num_bytes = self._load(slot, _MANIFEST_AT), self._load(slot, _MANIFEST_BYTES)
        found, wanted = zlib.crc32(block[at : at + num_bytes]), self._load(slot, _MANIFEST_CRC)
        if found != wanted:
            raise CorruptData(f"the manifest of version {version} must have checksum {wanted:08x}, got {found:08x}.")
        manifest = manifest_of(block, at, num_bytes)
        return {name: tensor.clone() for name, tensor in unpack(block, manifest).items()}, manifest["state"]

    def versions(self) -> tuple[int, ...]:
        """The versions that can be read, oldest first."""
        return tuple(sorted(self._held()))

    def close(self) -> None:
        """Let go of the segment, so that it can be closed."""
        del self._words, self._view

    def _replaced_by(self, version: int) -> int:
        held = {slot: held for held, slot in self._held().items()}
        return min(range(_NUM_SLOTS), key=lambda slot: _worth(held.get(slot), version))

    def _held(self) -> dict[int, int]:
        complete = {slot: self._load(slot, _COMPLETE) for slot in range(_NUM_SLOTS)}
        return {word - 1: slot for slot, word in complete.items() if word}

    def _load(self, slot: int, index: int) -> int:
        return self._words.load(slot * _NUM_WORDS + index)

    def _store(self, slot: int, index: int, value: int) -> None:
        self._words.store(slot * _NUM_WORDS + index, value)

    def _block(self, slot: int) -> memoryview:
        start = _CONTROL_BYTES + slot * self.capacity_bytes
        return self._view[start : start + self.capacity_bytes]


def _worth(held: int | None, version: int) -> tuple[int, int]:
    """How much a slot is worth keeping while `version` is written; the least is replaced, `None` is free or
    half-written."""
    if held is None:
        return (0, 0)
    if held == version:
        return (1, 0)
    return (2, -held) if held > version else (3, held)
