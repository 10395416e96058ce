"""A partition for threads: the same methods, blocking.

Owns the bridge from a thread that computes to the event loop that the bus lives on. Every wait keeps its name, its deadline
and its errors; an interrupt of the waiting thread cancels the call, and so does `cancel` from another thread.

    part = SyncPartition(bus.partition("eval"))      # on the loop
    for batch in part.stream("train", columns=["tokens"]):     # on another thread
        step(batch); batch.ack()

Invariant: never called on the loop's own thread, which would wait for itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.client import Listed, Partition, Rows
from rondo.comm.partitions.stats import PartitionStats
from rondo.comm.partitions.stream import Stream
from rondo.runtime.errors import Closed

T = TypeVar("T")


class SyncStream:
    """Iterates a `Stream`; leaving the loop early is fine, what was not acknowledged comes again."""

    def __init__(self, part: SyncPartition, stream: Stream) -> None:
        self._part = part
        self._stream = stream

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> Batch | None:
        """The next batch, or None at the end."""
        return self._part.run(self._stream.next())

    def flush(self) -> None:
        self._part.run(self._stream.flush())


class SyncPartition:
    """Made on the loop (or given it); used on any other thread. Methods are those of `Partition`."""

    def __init__(self, part: Partition, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.part = part
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self._calls: dict[Future[Any], None] = {}  # single steps only: ended ones leave on the loop's thread

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the partition on its loop and wait for it."""
        if getattr(self.loop, "_thread_id", None) == threading.get_ident():
            call.close()
            raise RuntimeError(
                "a blocking call must come from another thread than the bus's loop. Await the partition itself."
            )
        return self.result(self.begin(call))

    def begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine of the partition on its loop, from any thread."""
        future = asyncio.run_coroutine_threadsafe(call, self.loop)
        self._calls[future] = None
        future.add_done_callback(lambda ended: self._calls.pop(ended, None))
        return future

    def result(self, future: Future[T]) -> T:
        """Wait for what `begin` started. Closed when `cancel` ended it."""
        try:
            return future.result()
        except CancelledError as error:
            raise Closed(
                f"a call on partition {self.part.name} must be waited for, got cancelled. Call again for the same rows."
            ) from error
        finally:
            future.cancel()  # an interrupted wait; of a future that is done this changes nothing

    def cancel(self) -> None:
        """From any thread: calls that wait raise Closed now. A stream goes on afterwards with the batch that it waited for."""
        for future in list(self._calls):
            future.cancel()

    def put(self, columns: Mapping[str, Any], keys: Sequence[str] | None = None, **said: Any) -> None:
        self.run(self.part.put(columns, keys, **said))

    def add(self, rows: Rows, columns: Mapping[str, Any], *, deadline_s: float = 600.0) -> None:
        self.run(self.part.add(rows, columns, deadline_s=deadline_s))

    def end(self) -> None:
        self.run(self.part.end())

    def stream(self, task: str, **how: Any) -> SyncStream:
        return SyncStream(self, self.part.stream(task, **how))

    def get(self, rows: Sequence[str] | Sequence[int], columns: Sequence[str] | None = None, **how: Any) -> Batch:
        return self.run(self.part.get(rows, columns, **how))

    def list(self, **which: Any) -> tuple[Listed, int]:
        return self.run(self.part.list(**which))

    def tag(self, rows: Sequence[str] | Sequence[int], tags: Mapping[str, Any]) -> None:
        self.run(self.part.tag(rows, tags))

    def clear(self, rows: Sequence[str] | Sequence[int] | None = None) -> int:
        return self.run(self.part.clear(rows))

    def reset(self, task: str, to_pass: int = 1) -> int:
        return self.run(self.part.reset(task, to_pass))

    def drop(self) -> None:
        self.run(self.part.drop())

    def flush(self) -> None:
        self.run(self.part.flush())

    def stats(self) -> PartitionStats:
        return self.part.stats()
