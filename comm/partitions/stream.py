"""A stream of batches: one reader of one task, claim by claim.

Owns the order of a reader's claims and acknowledgements. An acknowledgement travels with the next claim, so a batch costs one
call; what is not acknowledged when the stream is left comes again with the next stream of the same reader, and when its process
dies, to whoever asks.

    async for batch in part.stream("reference", columns=["tokens"]):
        work(batch["tokens"])
        batch.ack()

Invariant: batches come in the order of their index, which is the same for every peer of a data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.opened import Opened
from rondo.comm.partitions.reading import Reading
from rondo.comm.partitions.spec import Sampler
from rondo.runtime.errors import Closed


class Stream:
    """`Partition.stream` makes it."""

    def __init__(
        self, part: Opened, reading: Reading, sampler: Sampler, version: Callable[[], int] | None, deadline_s: float
    ) -> None:
        self._part = part
        self._reading, self._asked = reading, asdict(reading)
        self._sampler, self._version = sampler, version
        self._deadline_s = deadline_s
        self._index = self._life = -1
        self._pass = 0
        self._asking = self._over = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Batch:
        found = None if self._over else await self.next()
        if found is None:
            raise StopAsyncIteration
        return found

    async def open(self) -> int:
        """Make or find the task. The stream begins with the first batch that this reader has not acknowledged: its pass."""
        if self._index < 0:
            self._index, self._pass = await self._part.ask("part_task", self._asked, self._sampler.dump())
            self._life = self._part.life
        return self._pass

    async def next(self) -> Batch | None:
        """The next batch, perhaps an empty one where other ranks have rows; None at the end. Waits."""
        part = self._part
        await self.open()
        if part.life != self._life:
            raise Closed(f"the partition of a stream must stay, got {part.name} dropped. Begin the stream anew.")
        version = self._version() if self._version is not None else None
        self._asking = True
        try:
            answer = await part.ask("part_claim", self._asked, self._index, version, deadline_s=self._deadline_s)
        finally:
            self._asking = False
        index, self._index = self._index, self._index + 1
        if "end" in answer:
            self._over = True
            await self.flush()
            return None
        records = await part.records(answer["batch"])
        return Batch(answer["batch"], records, lambda: self._acknowledge(index))

    async def flush(self) -> None:
        """Send the acknowledgements that no call has taken along."""
        await self._part.flush()

    def go_on(self) -> None:
        """After an end: batches that come behind it, of the next pass or put since. A new stream would begin with those that
        are not acknowledged yet."""
        self._over = False

    def _acknowledge(self, index: int) -> None:
        """Goes with the next claim; at once where one is waiting already, or none will come."""
        reading = self._reading
        ack = (reading.task, reading.consumer, reading.rank, reading.peer, index)
        if self._part.life == self._life:
            self._part.owe(ack, soon=self._asking or self._over)
