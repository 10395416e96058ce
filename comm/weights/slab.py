"""The weight slab: whole policy versions in shared memory, one a slot, each proved by checksum before it is served.

Owns how a version lies in a slot, when it counts as complete, and what of it can be read before. Does not own which slot is
written or held: that is the coordinator's (`versions.py`), which lets nobody write a slot that anybody reads; nor what a
manifest says (`manifest.py`).

    | control: 9 words a slot | slot 0: tensors, manifest | slot 1 | ... |        words: state, attempt, version, checksum, where
    the manifest lies, how often the slot was begun, bytes that stay as they are, bytes a bucket

Invariant: a slot is complete only while its state word says so; the word is cleared before the first byte changes and
set after the last. The checksum covers the manifest, which holds names, dtypes, shapes, offsets and one sum a
bucket: two slots have the same checksum when they hold the same tensors in the same order.

    writer = slab.write(0, attempt=0, version=4)
    for name, tensor in own_weights(model): writer.add(name, tensor)
    checksum = writer.finish()
    weights = slab.read(0, attempt=0, version=4, checksum=checksum)   # views, every bucket verified

A reader that is told of a version while it is written sums what is whole of it meanwhile:

    ahead = slab.read_ahead(0, attempt=0, version=4, patience_s=2)    # what it finds early counts only if the slot was not begun
    weights = slab.read(0, ..., ahead=ahead)                          # again since, and a sum that is wrong is made again
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch

from rondo.comm.ring.records import ALIGN_BYTES, align
from rondo.comm.ring.tensors import dtype_name
from rondo.comm.ring.words import LINE_BYTES, Words
from rondo.comm.weights.manifest import BUCKET_BYTES, BYTES_PER_TENSOR, Manifest, manifest_checksum
from rondo.comm.weights.sums import bucket_sum, in_threads
from rondo.runtime.errors import Closed, CorruptData, OutOfSpace
from rondo.runtime.memory.segments import Segment
from rondo.runtime.memory.to_host import to_host
from rondo.runtime.waits import blocking

_PAGE_BYTES = 4096
_NUM_WORDS = 9
_STATE, _ATTEMPT, _VERSION, _CHECKSUM, _MANIFEST_AT, _MANIFEST_BYTES, _BEGUN, _WHOLE_BYTES, _BUCKET_BYTES = range(
    _NUM_WORDS
)
_EMPTY, _WRITING, _COMPLETE = range(3)
_STATES = ("empty", "half-written", "complete")
_LOOK_S = 0.0005
"""How often a reader looks for more of a version that is being written: tens of buckets come in that many milliseconds."""


def slab_bytes(total_param_bytes: int, num_tensors: int, num_slots: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """The segment that holds `num_slots` versions of `num_tensors` tensors with `total_param_bytes` together."""
    # Tensors start at multiples of 64 bytes, so what is summed is a little more than the parameters.
    checksums = 12 * ((total_param_bytes + num_tensors * ALIGN_BYTES) // bucket_bytes + 1)
    manifest = 1024 + num_tensors * (BYTES_PER_TENSOR + ALIGN_BYTES) + checksums
    return _control_bytes(num_slots) + num_slots * _page(total_param_bytes + manifest)


class Ahead(NamedTuple):
    """Sums of the first buckets of a slot, found while it was written for the `begun`-th time."""

    slot: int
    begun: int
    sums: list[int]


class WeightSlab:
    """`num_slots` equal slots in `segment`. Readers open it read-only. `capacity_bytes` is one slot's, manifest
    included."""

    def __init__(self, segment: Segment, num_slots: int, *, readonly: bool = False) -> None:
        self.num_slots = num_slots
        self.capacity_bytes = (segment.num_bytes - _control_bytes(num_slots)) // num_slots // _PAGE_BYTES * _PAGE_BYTES
        if self.capacity_bytes < _PAGE_BYTES:
            raise ValueError(
                f"a slab of {num_slots} slots must have at least {_control_bytes(num_slots) + num_slots * _PAGE_BYTES} "
                f"bytes, got {segment.num_bytes}. Size it with slab_bytes."
            )
        self._view = segment.view(readonly=readonly)

    def write(self, slot: int, *, attempt: int, version: int, bucket_bytes: int = BUCKET_BYTES) -> SlotWriter:
        """Begin to overwrite `slot`, which nobody may hold; from here until `finish` it is readable for nobody."""
        words, block = self._slot(slot)
        words.store(_STATE, _WRITING)
        words.store(_WHOLE_BYTES, 0)
        words.store(_BEGUN, words.load(_BEGUN) + 1)
        words.store(_BUCKET_BYTES, bucket_bytes)
        words.store(_ATTEMPT, attempt)
        words.store(_VERSION, version)
        return SlotWriter(words, block, bucket_bytes)

    def join(self, slot: int, *, attempt: int, version: int, bucket_bytes: int = BUCKET_BYTES) -> SlotWriter:
        """Take part in writing a version that another process has begun in `slot`, and will finish. CorruptData for any other."""
        words, block = self._slot(slot)
        found = words.load(_STATE), words.load(_ATTEMPT), words.load(_VERSION)
        if found != (_WRITING, attempt, version):
            raise CorruptData(
                f"weight slot {slot} must be half-written with version {version} of attempt {attempt}, got "
                f"{_STATES[found[0]]} with version {found[2]} of attempt {found[1]}. Begin it first."
            )
        return SlotWriter(words, block, bucket_bytes)

    def complete(self) -> dict[int, tuple[int, int]]:
        """Version -> (slot, checksum), of all slots that are complete."""
        found = {}
        for slot in range(self.num_slots):
            words, _ = self._slot(slot)
            if words.load(_STATE) == _COMPLETE:
                found[words.load(_VERSION)] = slot, words.load(_CHECKSUM)
        return found

    def clear(self, slot: int) -> None:
        """What lies in `slot` counts no more."""
        self._slot(slot)[0].store(_STATE, _EMPTY)

    def read_ahead(self, slot: int, *, attempt: int, version: int, patience_s: float, num_threads: int = 1) -> Ahead:
        """Sum what is whole of a version that is being written, or soon will be; blocks until it is complete, the slot is begun
        again, or nothing has come for `patience_s`. Whether what was found is of use, `read` decides."""
        words, block = self._slot(slot)
        begun, sums, at = 0, list[int](), 0
        with blocking("weights written", peer="publisher", deadline_s=patience_s):
            due = time.monotonic() + patience_s
            while time.monotonic() < due:
                state, whole = words.load(_STATE), words.load(_WHOLE_BYTES)
                coming = (words.load(_ATTEMPT), words.load(_VERSION)) == (attempt, version) and state != _EMPTY
                begun = begun or words.load(_BEGUN) * coming
                if begun and words.load(_BEGUN) != begun:
                    break
                if coming and at < whole <= self.capacity_bytes:
                    size = words.load(_BUCKET_BYTES)
                    starts = range(at, whole, size)[:num_threads]
                    sums += in_threads(
                        bucket_sum, ((block[start : min(start + size, whole)],) for start in starts), num_threads
                    )
                    at, due = min(starts[-1] + size, whole), time.monotonic() + patience_s
                elif coming and state == _COMPLETE:
                    break
                else:
                    time.sleep(_LOOK_S)
        return Ahead(slot, begun, sums)

    def read(
        self, slot: int, *, attempt: int, version: int, checksum: int, num_threads: int = 1, ahead: Ahead | None = None
    ) -> dict[str, torch.Tensor]:
        """The version in `slot` as views, after verifying all of it; name -> tensor in the order of writing.

        The caller holds the slot for as long as it uses the tensors. `ahead`: what it summed before it was complete. Raises
        CorruptData for a slot that is not complete, holds another version or attempt, or has a single wrong bit.
        """
        block, manifest = self.contents(slot, attempt=attempt, version=version, checksum=checksum)
        begun = self._slot(slot)[0].load(_BEGUN)
        known = ahead.sums if ahead is not None and (ahead.slot, ahead.begun) == (slot, begun) else ()
        manifest.prove(block, num_threads=num_threads, known=known)
        return manifest.views(block)

    def contents(
        self, slot: int, *, attempt: int, version: int, checksum: int, summed: bool = True
    ) -> tuple[memoryview, Manifest]:
        """The slot's bytes, and its manifest, which is verified where the tensors are not (as `read`)."""
        words, block = self._slot(slot)
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
        at, num_bytes = words.load(_MANIFEST_AT), words.load(_MANIFEST_BYTES)
        if not 0 < num_bytes <= at + num_bytes <= block.nbytes:
            raise CorruptData(
                f"the manifest of weight slot {slot} must lie inside it, got bytes {at} to {at + num_bytes}."
            )
        raw, what = bytes(block[at : at + num_bytes]), f"the manifest of version {version}"
        return block, Manifest.parse(raw, checksum, what, summed=summed)

    def close(self) -> None:
        """Let go of the segment, so that it can be closed. Tensors still held keep their memory mapped."""
        del self._view

    def _slot(self, slot: int) -> tuple[Words, memoryview]:
        """Its words, and its bytes."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"a weight slot must be between 0 and {self.num_slots - 1}, got {slot}.")
        start = _control_bytes(self.num_slots) + slot * self.capacity_bytes
        words = Words(self._view, slot * _NUM_WORDS * LINE_BYTES, _NUM_WORDS)
        return words, self._view[start : start + self.capacity_bytes]


class SlotWriter:
    """One version on its way into a slot. Dropping it, or dying, leaves the slot half-written: nobody reads it."""

    def __init__(self, words: Words, block: memoryview, bucket_bytes: int) -> None:
        self.block = np.frombuffer(block, np.uint8)
        self._words = words
        self._bucket_bytes = bucket_bytes
        self._tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._end = 0
        self._finished = False

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in under its Hugging Face disk name (any dtype, device and strides).

        Raises OutOfSpace when the slot is too small, ValueError for a name twice, Closed after `finish`.
        """
        start, end = self.place(name, tensor)
        if end > start:
            into = torch.from_numpy(self.block[start:end]).view(tensor.dtype).view(tensor.shape)
            to_host(into, tensor)

    def place(self, name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """As `add`, but the caller copies: the bytes of `tensor` belong to `block` from the first to the second."""
        self._check_open()
        if name in self._tensors:
            raise ValueError(f"tensors of one block must have different names, got {name} twice.")
        start, end = align(self._end), align(self._end) + tensor.numel() * tensor.element_size()
        if end > self.block.size:
            raise OutOfSpace(
                f"tensor {name} must end within {self.block.size} bytes, got {end}. Make the segment larger."
            )
        self.block[self._end : start] = 0
        self._tensors[name] = (dtype_name(tensor.dtype), tuple(tensor.shape), start)
        self._end = end
        return start, end

    def whole(self, num_bytes: int) -> None:
        """So many bytes from the first stay as they are: whole buckets of them, or all. Readers may sum them."""
        self._words.store(_WHOLE_BYTES, num_bytes)

    def finish(self, sums: list[int] | None = None, extra: dict[str, Any] | None = None) -> int:
        """Complete the slot. Returns the version's checksum (64 bits), which a reader must name.

        `sums` of all buckets, from whoever has summed them while it copied; none ([]) where only the manifest is to have a
        checksum. `extra`, JSON-able, stands in the manifest.
        """
        self._check_open()
        if sums is None:
            starts = range(0, self._end, self._bucket_bytes)
            sums = [bucket_sum(self.block[start : min(start + self._bucket_bytes, self._end)]) for start in starts]
        about = {
            "tensors": self._tensors,
            "num_bytes": self._end,
            "bucket_bytes": self._bucket_bytes,
            "checksums": sums,
        }
        raw = orjson.dumps(about | (extra or {}), option=orjson.OPT_SERIALIZE_NUMPY)
        at = align(self._end)
        if at + len(raw) > self.block.size:
            raise OutOfSpace(
                f"the manifest of {len(self._tensors)} tensors must end within {self.block.size} bytes, "
                f"got {at + len(raw)}. Make the segment larger."
            )
        self.block[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
        checksum = manifest_checksum(raw)
        for index, value in ((_MANIFEST_AT, at), (_MANIFEST_BYTES, len(raw)), (_CHECKSUM, checksum)):
            self._words.store(index, value)
        self._words.store(_STATE, _COMPLETE)
        self._finished = True
        return checksum

    def _check_open(self) -> None:
        if self._finished:
            raise Closed("a finished weight slot must stay as it is, got another write. Begin with WeightSlab.write.")


def _page(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _control_bytes(num_slots: int) -> int:
    return _page(align(num_slots * _NUM_WORDS * LINE_BYTES))
