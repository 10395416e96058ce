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
from dataclasses import dataclass
from typing import Any

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.opened import Opened
from rondo.comm.partitions.spec import Sampler
from rondo.runtime.errors import Closed, ConfigError


@dataclass(frozen=True, slots=True)
class Reading:
    """How a task is read. `rank` of `ranks` is the data-parallel rank, `peer` of `peers` this process among its equals."""

    task: str
    columns: tuple[str, ...]
    sampler: Sampler
    batch: int
    rank: int
    ranks: int
    peer: int
    peers: int
    until: str
    partial: bool
    consumer: str
    version: Callable[[], int] | None
    deadline_s: float

    def __post_init__(self) -> None:
        if not self.columns or self.until not in ("end", "now") or not 0 <= self.rank < self.ranks or self.batch < 1:
            raise ConfigError(
                "a stream must name columns, end with 'end' or 'now', and be for a rank below ranks with at least one row, got "
                f"columns {self.columns}, until {self.until!r}, rank {self.rank} of {self.ranks} and batch {self.batch}."
            )

    def reader(self) -> list[Any]:
        return [self.consumer, self.rank, self.ranks, self.peer, self.peers]


class Stream:
    def __init__(self, part: Opened, reading: Reading) -> None:
        self._part = part
        self._reading = reading
        self._index = -1
        self._life = -1
        self._acks: dict[int, None] = {}  # single steps only: a batch may be acknowledged on another thread
        self._pass = 0
        self._asking = False
        self._over = False

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
            reading = self._reading
            arguments = [reading.task, list(reading.columns), reading.sampler.dump(), reading.reader()]
            self._index, self._pass = await self._part.ask("part_task", *arguments)
            self._life = self._part.life
        return self._pass

    async def next(self) -> Batch | None:
        """The next batch, perhaps an empty one where other ranks have rows; None at the end. Waits."""
        reading, part = self._reading, self._part
        await self.open()
        if part.life != self._life:
            raise Closed(f"the partition of a stream must stay, got {part.name} dropped. Begin the stream anew.")
        sent = list(self._acks)
        version = reading.version() if reading.version is not None else None
        want = [self._index, reading.batch, reading.until, reading.partial, version]
        arguments = [reading.task, reading.reader(), want, sent, list(reading.columns)]
        self._asking = True
        try:
            answer = await part.ask("part_claim", *arguments, deadline_s=reading.deadline_s)
        finally:
            self._asking = False
        self._sent(sent)
        index, self._index = self._index, self._index + 1
        if "end" in answer:
            self._over = True
            await self.flush()
            return None
        records = await part.records(answer["batch"])
        return Batch(answer["batch"], records, lambda: self._acknowledge(index))

    async def flush(self) -> None:
        """Send the acknowledgements that no claim has taken along."""
        sent = list(self._acks)
        if sent:
            await self._part.ask("part_ack", self._reading.task, self._reading.reader(), sent)
            self._sent(sent)

    def _sent(self, indices: list[int]) -> None:
        for index in indices:
            self._acks.pop(index, None)

    @property
    def owes(self) -> bool:
        """Whether acknowledgements wait to be sent."""
        return bool(self._acks)

    def go_on(self) -> None:
        """After an end: batches that come behind it, of the next pass or put since. A new stream would begin with those that
        are not acknowledged yet."""
        self._over = False

    def close(self) -> None:
        """No more batches; acknowledgements still to be sent go with `flush`."""
        self._over = True

    def _acknowledge(self, index: int) -> None:
        """Goes with the next claim; at once where one is waiting already, or none will come."""
        self._acks[index] = None
        self._part.owed(self, soon=self._asking or self._over)
