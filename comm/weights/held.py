"""One policy version as bytes: what a sender has of it, and a receiver's own copy with the moment from which it counts.

Owns how a version is named, and when a copy may be served. Does not own what describes it (`manifest.py`), nor how bytes come
here (such as `delta.py`).

    nothing --begin--> changing --prove--> proved (id, tensors) --begin or change--> changing ...
                           |                                                            ^
                           +-- an error, a wrong sum: stays changing, serves nothing ---+ the whole version repairs it

Invariant: `tensors` gives a version only after every bucket of its memory had the sum that its manifest names, and the
manifest the checksum that the version's name carries. From the first byte that changes until then there is none.

    held = Held(published.manifest.num_bytes)
    held.begin(published.id, published.manifest.raw)
    for index in range(held.manifest.num_buckets): held.bucket(index)[:] = published.bucket(index)
    held.prove()
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rondo.comm.weights.manifest import Manifest
from rondo.comm.weights.slab import WeightSlab
from rondo.comm.weights.sums import bucket_sum, in_threads
from rondo.runtime.errors import Closed, CorruptData, OutOfSpace


class VersionId(NamedTuple):
    """Names a policy version for good: the checksum is the one of its manifest, so equal names have equal bytes."""

    attempt: int
    version: int
    checksum: int

    @classmethod
    def from_json(cls, fields: Any) -> VersionId:
        """Raises CorruptData for anything but three whole numbers that are not negative."""
        if not isinstance(fields, list) or len(fields) != 3 or not all(type(n) is int and n >= 0 for n in fields):
            raise CorruptData(f"a version's name must be [attempt, version, checksum], got {fields!r}.")
        return cls(*fields)

    def __str__(self) -> str:
        return f"{self.version} (attempt {self.attempt}, checksum {self.checksum:016x})"


@dataclass(frozen=True, slots=True)
class Published:
    """A complete version as its sender has it. `data` [num_bytes] uint8 must stay as it is while this is used."""

    id: VersionId
    manifest: Manifest
    data: np.ndarray

    @classmethod
    def in_slab(cls, slab: WeightSlab, slot: int, id: VersionId) -> Published:
        """What lies in `slot`, which the caller holds; its buckets are not verified. Raises CorruptData as `slab.read`."""
        block, manifest = slab.contents(slot, attempt=id.attempt, version=id.version, checksum=id.checksum)
        return cls(id, manifest, np.frombuffer(block, np.uint8, manifest.num_bytes))

    def bucket(self, index: int) -> np.ndarray:
        start, end = self.manifest.bounds(index)
        return self.data[start:end]

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.manifest.views(self.data)


class Held:
    """A receiver's copy of one version, in `capacity_bytes` of its own memory. One thread at a time changes it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._memory = mmap.mmap(-1, max(1, capacity_bytes))
        self._data = np.frombuffer(self._memory, np.uint8)
        self._proved: VersionId | None = None
        self._coming: VersionId | None = None
        self._manifest: Manifest | None = None
        self._right: set[int] = set()

    @property
    def id(self) -> VersionId | None:
        """The version that is proved, None while there is none."""
        return self._proved

    @property
    def manifest(self) -> Manifest:
        """Of the version that is proved or coming. Raises Closed before the first."""
        if self._manifest is None:
            raise Closed("a held version must have begun, got none. Receive a whole version first")
        return self._manifest

    def begin(self, id: VersionId, raw: bytes) -> None:
        """From here on this memory is to become version `id`, whose manifest is `raw`; nothing is served until `prove`.

        Raises CorruptData or OutOfSpace, and leaves what is held, for a manifest that is damaged or too large.
        """
        manifest = Manifest.parse(raw, id.checksum)
        if manifest.num_bytes > self.capacity_bytes:
            raise OutOfSpace(
                f"version {id} must fit into {self.capacity_bytes} bytes, got {manifest.num_bytes}. Hold it in more memory"
            )
        manifest.views(self._data[: manifest.num_bytes])
        self._proved, self._coming, self._manifest, self._right = None, id, manifest, set()

    def bucket(self, index: int) -> np.ndarray:
        """The bytes of bucket `index`, to be written. Raises Closed once the version is proved: it stays as it is."""
        if self._coming is None:
            raise Closed("a proved version must stay as it is, got a write. Begin another version")
        self._right.discard(index)
        start, end = self.manifest.bounds(index)
        return self._data[start:end]

    def is_right(self, index: int) -> bool:
        """Whether bucket `index` has the sum that the manifest names; summed once after it was written."""
        start, end = self.manifest.bounds(index)
        if index not in self._right and bucket_sum(self._data[start:end]) == self.manifest.sums[index]:
            self._right.add(index)
        return index in self._right

    def prove(self, *, num_threads: int = 1) -> None:
        """Verify every bucket; then the version counts. Raises CorruptData, and it does not, when one is wrong."""
        manifest, coming = self.manifest, self._coming
        if coming is None:
            raise Closed("a proved version must stay as it is, got another proof. Begin another version")
        right = in_threads(self.is_right, ((index,) for index in range(manifest.num_buckets)), num_threads)
        wrong = [index for index, good in enumerate(right) if not good]
        if wrong:
            raise CorruptData(
                f"every bucket of version {coming} must have the sum its manifest names, got {len(wrong)} of "
                f"{manifest.num_buckets} that have not (first {wrong[0]}). Receive the whole version again"
            )
        self._proved, self._coming = coming, None

    def published(self) -> Published:
        """The proved version, to be sent on. Raises Closed while there is none."""
        if self._proved is None:
            raise Closed("a version must be proved before it is served, got none. Receive a whole version first")
        return Published(self._proved, self.manifest, self._data[: self.manifest.num_bytes])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The proved version as views of this memory, good until the next `begin`. Raises Closed while there is none."""
        return self.published().tensors()
