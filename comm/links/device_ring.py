"""A mirror whose payloads lie in a torch tensor: arrived records are read where they are used, on the GPU.

Owns the tensor and the views of it. Does not own what is visible (`Mirror`, unchanged) nor how bytes come (`collective.py`).

    host segment    | control words | header, descriptor |    (untouched)    | header, descriptor | ...
    device tensor                   |    (untouched)     | payload           |    (untouched)     | ...

Both have the ring's offsets, so a record lies at the same place in each; host pages that nobody touches take no memory in a
segment that was not allocated ahead. Invariant: a payload is complete on the device before the head passes it. The tensor dies
with its process: a mirror opened anew over a segment in use begins at its tail again, and the origin must be held up to what
was released, not only up to what was mirrored. Readers live in the process of the mirror.

Tested with tensors on the CPU; not yet run on a GPU.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from rondo.comm.links.mirror import Mirror
from rondo.comm.ring.records import STORAGE
from rondo.comm.ring.ring import HEAD_WORD, SEQ_WORD, Record, RingView
from rondo.comm.ring.tensors import torch_dtype
from rondo.runtime.memory.segments import Segment


class DeviceMirror(Mirror):
    """`payload` is uint8 [capacity] on `device` ("cpu", "cuda:1")."""

    def __init__(self, segment: Segment, doorbell_fd: int | None, name: str, *, device: str) -> None:
        super().__init__(segment, doorbell_fd, name)
        self.payload = torch.empty(self.capacity, dtype=torch.uint8, device=device)
        if self.head != self.tail:  # payloads of an earlier process are gone with it
            self._words.store(HEAD_WORD, self.tail)
            self._words.store(SEQ_WORD, 0)

    def store_payload(self, pos: int, data: Any) -> None:
        """Keep the piece of a payload, uint8 [n], at log offset `pos`; returns when the device has it. See `Mirror.target`."""
        self.target(pos, len(data))
        at = pos % self.capacity
        self.payload[at : at + len(data)].copy_(data)
        if self.payload.is_cuda:
            torch.cuda.current_stream(self.payload.device).synchronize()

    def close(self) -> None:
        del self.payload
        super().close()


class DeviceRecord(Record):
    """One record: its arrays are tensors that view the mirror's, good until it is released. Check `valid()` after the last use.

    On a GPU the last use has ended when the device is done with it, not when it was queued.
    """

    def arrays(self, name: str) -> list[Any]:
        """The column `name`, one tensor a row, of the column's dtype and the row's shape. Raises KeyError."""
        layout, tensors = self._layout(name), []
        start = layout.offset
        for shape in layout.shapes or [[length] for length in layout.lengths or ()]:
            end = start + prod(shape) * STORAGE[layout.dtype].itemsize
            tensors.append(self._payload[start:end].view(torch_dtype(layout.dtype)).view(shape))
            start = end
        return tensors


class DeviceView:
    """A reader in the mirror's process."""

    def __init__(self, segment: Segment, mirror: DeviceMirror) -> None:
        self._host = RingView(segment, mirror.name)
        self._payload = mirror.payload

    def read(self, pos: int, seq: int) -> DeviceRecord:
        """The record at log offset `pos` with generation `seq`. Raises CorruptData when the mirror holds it no more."""
        record = self._host.read(pos, seq)
        at = pos % self._host.capacity
        payload: Any = self._payload[at + record.descriptor.payload : at + record.ref.num_bytes]
        return DeviceRecord(self._host, record.ref, record.descriptor, payload)

    def close(self) -> None:
        del self._payload
        self._host.close()
