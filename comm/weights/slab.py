"""The weight slab: whole policy versions in shared memory, one a slot, each proved by checksum before it is served.

Owns how a version lies in a slot and when it counts as complete. Does not own which slot is written or held: that is
the coordinator's (`versions.py`), which lets nobody write a slot that anybody reads.

    | control: 8 words a slot | slot 0: tensors, manifest | slot 1 | ... |        words: state, attempt, version,
    checksum, ...

Invariant: a slot is complete only while its state word says so; the word is cleared before the first byte changes and
set after the last. The checksum covers the manifest, which holds names, dtypes, shapes, offsets and one sum a
bucket: two slots have the same checksum when they hold the same tensors in the same order.

    writer = slab.write(0, attempt=0, version=4)
    for name, tensor in full_tensors(model): writer.add(name, tensor)
    checksum = writer.finish()
    weights = slab.read(0, attempt=0, version=4, checksum=checksum)   # views, every bucket verified
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from rondo.comm.ring.records import ALIGN_BYTES, align
from rondo.comm.ring.ring import Memory
from rondo.comm.ring.tensors import BUCKET_BYTES, MANIFEST_BYTES_PER_TENSOR, Packer, manifest_of, unpack, verify
from rondo.comm.ring.words import LINE_BYTES, Words
from rondo.runtime.errors import Closed, CorruptData

_PAGE_BYTES = 4096
_NUM_WORDS = 8
_STATE, _ATTEMPT, _VERSION, _CHECKSUM, _MANIFEST_AT, _MANIFEST_BYTES = range(6)
_EMPTY, _WRITING, _COMPLETE = range(3)
_STATES = ("empty", "half-written", "complete")


def slab_bytes(total_param_bytes: int, num_tensors: int, num_slots: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """The segment that holds `num_slots` versions of `num_tensors` tensors with `total_param_bytes` together."""
    # Tensors start at multiples of 64 bytes, so what is summed is a little more than the parameters.
    checksums = 12 * ((total_param_bytes + num_tensors * ALIGN_BYTES) // bucket_bytes + 1)
    manifest = 1024 + num_tensors * (MANIFEST_BYTES_PER_TENSOR + ALIGN_BYTES) + checksums
    return _control_bytes(num_slots) + num_slots * _page(total_param_bytes + manifest)


class WeightSlab:
    """`num_slots` equal slots in `segment`. Readers open it read-only. `capacity_bytes` is one slot's, manifest
    included."""

    def __init__(self, segment: Memory, num_slots: int, *, readonly: bool = False) -> None:
        self.num_slots = num_slots
        self.capacity_bytes = (segment.num_bytes - _control_bytes(num_slots)) // num_slots // _PAGE_BYTES * _PAGE_BYTES
        if self.capacity_bytes < _PAGE_BYTES:
            raise ValueError(
                f"a slab of {num_slots} slots must have at least {_control_bytes(num_slots) + num_slots * _PAGE_BYTES} "
                f"bytes, got {segment.num_bytes}. Size it with slab_bytes."
            )
        self._view = segment.view(readonly=readonly)
        self._words = Words(self._view, 0, num_slots * _NUM_WORDS)

    def write(
        self, slot: int, *, attempt: int, version: int, bucket_bytes: int = BUCKET_BYTES, summed: bool = True
    ) -> SlotWriter:
        """Begin to overwrite `slot`, which nobody may hold; from here until `finish` it is readable for nobody.

        Without `summed` only the manifest has a checksum.
        """
        words = _SlotWords(self._words, self._index(slot))
        words.store(_STATE, _WRITING)
        words.store(_ATTEMPT, attempt)
        words.store(_VERSION, version)
        packer = Packer(self._block(slot), checksums=summed, bucket_bytes=bucket_bytes)
        return SlotWriter(words, packer, self._block(slot))

    def complete(self) -> dict[int, tuple[int, int]]:
        """Version -> (slot, checksum), of all slots that are complete."""
        found = {}
        for slot in range(self.num_slots):
            words = _SlotWords(self._words, slot)
            if words.load(_STATE) == _COMPLETE:
                found[words.load(_VERSION)] = slot, words.load(_CHECKSUM)
        return found

    def clear(self, slot: int) -> None:
        """What lies in `slot` counts no more."""
        _SlotWords(self._words, self._index(slot)).store(_STATE, _EMPTY)

    def read(
        self, slot: int, *, attempt: int, version: int, checksum: int, num_threads: int = 1
    ) -> dict[str, torch.Tensor]:
        """The version in `slot` as views, after verifying all of it; name -> tensor in the order of writing.

        The caller holds the slot for as long as it uses the tensors. Raises CorruptData for a slot that is not
        complete, holds another version or attempt, or has a single wrong bit.
        """
        block, encoded = self.contents(slot, attempt=attempt, version=version, checksum=checksum)
        manifest = manifest_of(encoded, 0, encoded.nbytes)
        verify(block, manifest, num_threads=num_threads)
        return unpack(block, manifest)

    def contents(self, slot: int, *, attempt: int, version: int, checksum: int) -> tuple[memoryview, memoryview]:
        """The slot's bytes, and among them its manifest, which is verified where the tensors are not (as `read`)."""
        words = _SlotWords(self._words, self._index(slot))
        state = words.load(_STATE)
        if state != _COMPLETE:
            found = _STATES[state] if state < len(_STATES) else f"state {state}"
            raise CorruptData(
                f"weight slot {slot} must be complete, got {found}. Read only what the coordinator names."
            )
        for what, index, wanted in (
            ("attempt", _ATTEMPT, attempt),
            ("version", _VERSION, version),
            ("checksum", _CHECKSUM, checksum),
        ):
            if words.load(index) != wanted:
                raise CorruptData(f"weight slot {slot} must hold {what} {wanted}, got {words.load(index)}.")
        block = self._block(slot)
        at, num_bytes = words.load(_MANIFEST_AT), words.load(_MANIFEST_BYTES)
        if not 0 < num_bytes <= at + num_bytes <= block.nbytes:
            raise CorruptData(
                f"the manifest of weight slot {slot} must lie inside it, got bytes {at} to {at + num_bytes}."
            )
        found_checksum = manifest_checksum(block[at : at + num_bytes])
        if found_checksum != checksum:
            raise CorruptData(f"the manifest of version {version} must have checksum {checksum}, got {found_checksum}.")
        return block, block[at : at + num_bytes]

    def close(self) -> None:
        """Let go of the segment, so that it can be closed. Tensors still held keep their memory mapped."""
        del self._words, self._view

    def _index(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"a weight slot must be between 0 and {self.num_slots - 1}, got {slot}.")
        return slot

    def _block(self, slot: int) -> memoryview:
        start = _control_bytes(self.num_slots) + slot * self.capacity_bytes
        return self._view[start : start + self.capacity_bytes]


class SlotWriter:
    """One version on its way into a slot. Dropping it, or dying, leaves the slot half-written: nobody reads it."""

    def __init__(self, words: _SlotWords, packer: Packer, block: memoryview) -> None:
        self._words = words
        self._packer: Packer | None = packer
        self.block = block

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in under its Hugging Face disk name (any dtype, device and strides).

        Raises OutOfSpace when the slot is too small, ValueError for a name twice, Closed after `finish`.
        """
        self._open().add(name, tensor)

    def place(self, name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """As `add`, but the caller copies: the bytes of `tensor` belong to `block` from the first to the second."""
        return self._open().place(name, tensor)

    def finish(self, checksums: list[int] | None = None, extra: dict[str, Any] | None = None) -> int:
        """Complete the slot. Returns the version's checksum (64 bits), which a reader must name.

        `checksums` of all buckets, from whoever has summed them while it copied; `extra`, JSON-able, stands in the manifest.
        """
        at, num_bytes = self._open().finish(extra, checksums=checksums)
        checksum = manifest_checksum(self.block[at : at + num_bytes])
        for index, value in ((_MANIFEST_AT, at), (_MANIFEST_BYTES, num_bytes), (_CHECKSUM, checksum)):
            self._words.store(index, value)
        self._words.store(_STATE, _COMPLETE)
        self._packer = None
        return checksum

    def _open(self) -> Packer:
        if self._packer is None:
            raise Closed("a finished weight slot must stay as it is, got another write. Begin with WeightSlab.write.")
        return self._packer


class _SlotWords:
    """The words of one slot."""

    def __init__(self, words: Words, slot: int) -> None:
        self._words = words
        self._first = slot * _NUM_WORDS

    def load(self, index: int) -> int:
        return self._words.load(self._first + index)

    def store(self, index: int, value: int) -> None:
        self._words.store(self._first + index, value)


def manifest_checksum(manifest: memoryview | bytes) -> int:
    """What names a version's content: 64 bits of BLAKE2b over its manifest, which holds the sums of all buckets."""
    return int.from_bytes(hashlib.blake2b(manifest, digest_size=8).digest(), "little")


def _page(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _control_bytes(num_slots: int) -> int:
    return _page(align(num_slots * _NUM_WORDS * LINE_BYTES))
