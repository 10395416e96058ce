"""Publishing: weights are copied and summed between two training steps, further sendings run beside the next one.

Owns the split of one publication over two threads, and that no failure of either is lost. Does not own the slab's slots (the
coordinator lends one), who has which part of the weights (an iterator of named tensors), copying (`copying.py`, or `together.py`
where several ranks have parts), nor telling anybody.

    trainer's thread      copy, sum | next step's rounds .................. | optimizer changes weights
    a thread beside it    copy, sum |
    publisher's thread              | send: delta, broadcast |
                                                             ^ copied.sent

Invariant: when `copy` returns, the slot is complete, so the optimizer may change the weights. At most one publication is under
way: `copy` waits for the one before, and fails with its error if nobody has seen that yet.

    publisher = Publisher(slab, [to_other_nodes])
    copied = publisher.copy(slot, attempt=0, version=5, tensors=trainer.weights())      # on the trainer's thread
    ...                                                                                 # end_publish, with copied.id.checksum
    await asyncio.wrap_future(copied.sent)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rondo.comm.weights.copying import copy_and_sum
from rondo.comm.weights.held import Published, VersionId
from rondo.comm.weights.manifest import BUCKET_BYTES
from rondo.comm.weights.slab import WeightSlab
from rondo.comm.weights.together import first_part
from rondo.runtime.errors import Closed
from rondo.runtime.waits import blocking

Send = Callable[[Published, Published | None], None]
"""Sends a complete version on; the second is the version before, where its slot still holds it. On the publisher's thread."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A version that its slot holds. `sent`: every `Send` has returned."""

    slot: int
    id: VersionId
    sent: Future[None]


class Publisher:
    """Copies versions into `slab` one after the other. `sends` run in order, after the slot is complete.

    `num_threads`, the calling one among them, copy and sum. One thread calls `copy`; `close` waits for what is under way.
    `beside`: a gloo group of all ranks that have parts of the tensors, this one its first; nothing else uses it meanwhile.
    """

    def __init__(
        self,
        slab: WeightSlab,
        sends: Sequence[Send] = (),
        *,
        bucket_bytes: int = BUCKET_BYTES,
        num_threads: int = 2,
        beside: dist.ProcessGroup | None = None,
    ) -> None:
        self._slab = slab
        self._sends = tuple(sends)
        self._bucket_bytes = bucket_bytes
        self._num_threads = num_threads
        self._beside = beside
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._last: Copied | None = None
        self._before: tuple[int, Published] | None = None
        self._closed = False

    def copy(
        self,
        slot: int,
        *,
        attempt: int,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        deadline_s: float = 600.0,
    ) -> Copied:
        """Copy `tensors` into `slot`, which the coordinator lent, and return; its sends follow. Collective with `beside`, whose
        other ranks do their `other_part`.

        Waits up to `deadline_s` for the publication before, and raises its error. Raises what `tensors` and the slab raise;
        the slot stays half-written then, and is served to nobody.
        """
        if self._closed:
            raise Closed("a publisher must be open, got a version after close. Make another one")
        self.wait(deadline_s)
        if self._before is not None and self._before[0] == slot:
            self._before = None  # its bytes are about to change
        writer = self._slab.write(slot, attempt=attempt, version=version, bucket_bytes=self._bucket_bytes)
        if self._beside is None:
            sums = copy_and_sum(writer, tensors, self._bucket_bytes, self._num_threads)
        else:
            sums = first_part(writer, slot, tensors, self._bucket_bytes, self._beside)
        id = VersionId(attempt, version, writer.finish(sums))
        self._last = Copied(slot, id, self._thread.submit(self._send, slot, id))
        return self._last

    def wait(self, deadline_s: float = 600.0) -> None:
        """Until nothing is under way. Raises the error of what was, once."""
        last, self._last = self._last, None
        if last is not None:
            with blocking("publication", peer="publisher", deadline_s=deadline_s):
                last.sent.result(deadline_s)

    def close(self) -> None:
        """Finish what is under way, end the thread, and let go of the slab."""
        self._closed = True
        self._thread.shutdown(wait=True)
        self._before = None

    def _send(self, slot: int, id: VersionId) -> None:
        if not self._sends:
            return
        published = Published.in_slab(self._slab, slot, id)
        before = self._before[1] if self._before is not None else None
        for send in self._sends:
            send(published, before)
        self._before = slot, published
