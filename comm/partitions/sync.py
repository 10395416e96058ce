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
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.client import Partition
from rondo.comm.partitions.stats import PartitionStats
from rondo.comm.partitions.stream import Stream
from rondo.runtime.errors import Closed

P = ParamSpec("P")
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


def _blocking(
    method: Callable[Concatenate[Partition, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncPartition, P], T]:
    """The same method for a thread, which waits for its end."""

    @functools.wraps(method)
    def waited_for(self: SyncPartition, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method(self.part, *args, **kwargs))

    return waited_for


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

    put = _blocking(Partition.put)
    add = _blocking(Partition.add)
    end = _blocking(Partition.end)
    get = _blocking(Partition.get)
    list = _blocking(Partition.list)
    tag = _blocking(Partition.tag)
    clear = _blocking(Partition.clear)
    reset = _blocking(Partition.reset)
    drop = _blocking(Partition.drop)
    flush = _blocking(Partition.flush)

    def stream(self, task: str, **how: Any) -> SyncStream:
        return SyncStream(self, self.part.stream(task, **how))

    def stats(self) -> PartitionStats:
        return self.part.stats()
