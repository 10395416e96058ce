"""A task of a partition as a torch data set that streams: one a data-parallel rank, for one pass or several.

Owns reading ahead and the passes. Which rows come, and in which order, is the task's sampler's; batches are whole already, so a
`DataLoader` around it takes `batch_size=None`.

    loader = StreamingLoader(SyncPartition(part), "train", ["tokens", "loss_mask"], batch=32, passes=3)
    for columns in DataLoader(loader, batch_size=None):        # or simply: for columns in loader
        columns["tokens"]                                      # one tensor a row; JSON columns: one value a row

The iteration ends when the partition has ended and every pass is read. `prefetch` batches are claimed ahead. A batch is
acknowledged when the next one is asked for; a process that dies before gets it again, and goes on in the pass it was in.

Invariant: every rank sees the same number of batches in every pass; some may be empty.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.spec import Sampler
from rondo.comm.partitions.sync import SyncPartition
from rondo.runtime.errors import ConfigError

Columns = dict[str, list[Any]]


class StreamingLoader(IterableDataset):
    """`convert` makes of a batch what the iteration yields; by default {column: one tensor a row}, copied out of the rings."""

    def __init__(
        self,
        part: SyncPartition,
        task: str,
        columns: Sequence[str],
        *,
        sampler: Sampler | None = None,
        batch: int = 64,
        rank: int | None = None,
        ranks: int | None = None,
        passes: int = 1,
        prefetch: int = 2,
        convert: Callable[[Batch], Any] | None = None,
    ) -> None:
        if passes < 1 or prefetch < 1:
            raise ConfigError(f"passes and prefetch must be at least 1, got {passes} and {prefetch}.")
        self._part = part
        self._task = task
        self._how: dict[str, Any] = {
            "columns": columns, "sampler": sampler, "batch": batch, "rank": rank, "ranks": ranks,
        }  # fmt: skip
        self._passes = passes
        self._prefetch = prefetch
        self._convert = convert or tensors_of

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError("a StreamingLoader reads ahead by itself: its DataLoader must have num_workers=0.")
        part, room = self._part, asyncio.Semaphore(self._prefetch)
        batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()  # claimed on the loop, not yet taken here

        async def read_ahead() -> None:
            stream = part.part.stream(self._task, **self._how)
            for number in range(await stream.open(), self._passes):
                await part.part.reset(self._task, number)
                stream.go_on()
                while (batch := await stream.next()) is not None:
                    await room.acquire()
                    batches.put(batch)

        reading = part.begin(read_ahead())
        reading.add_done_callback(lambda _: batches.put(None))  # also where it was cancelled before it began
        try:
            while (
                batch := batches.get()
            ) is not None:  # every wait of `read_ahead` has a deadline, and None comes with its end
                part.loop.call_soon_threadsafe(room.release)
                yield self._convert(batch)
                batch.ack()
            part.result(reading)
        finally:
            reading.cancel()
            part.flush()

    def reset(self) -> None:
        """One more pass after the last: the next iteration reads everything again."""
        self._part.reset(self._task, self._passes)
        self._passes += 1


def tensors_of(batch: Batch) -> Columns:
    """{column: one tensor a row, or one value a row of a JSON column}, copied out of the rings."""
    batch.copied()
    return {name: batch[name] if batch.is_json(name) else batch.tensors(name) for name in batch}
