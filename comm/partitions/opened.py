"""A partition that this process has open: its number, its counters, its records, and what is still to be acknowledged.

Owns what writing (`client.py`) and reading (`stream.py`) share. Decides nothing: every question is a call.

    await part.opened()                      # made at the first use, by whoever comes first
    answer = await part.ask("part_get", ...)
    records = await part.records(answer)     # mapped read-only; rings that were taken away since are let go

Invariant: every question takes along the acknowledgements that are owed, so that its answer counts them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rondo.comm.bus.member import Calls
from rondo.comm.partitions.memory import Memories
from rondo.comm.partitions.stats import DROPPED, NEW, PartitionStats, StatsReader, stats_name
from rondo.comm.ring.ring import Record
from rondo.comm.ring.views import Segments, Views, Writers
from rondo.runtime.errors import Closed, RondoError

_KEPT_RECORDS = 64  # records whose views are kept: a claim may take a part of one, and the next claim the next part


class Opened:
    """Belongs to one event loop."""

    def __init__(self, name: str, settings: Mapping[str, Any], call: Calls, segments: Segments) -> None:
        self.name = name
        self.member = call.member
        self._settings = dict(settings)
        self._call = call
        self._memories = Memories(segments)
        self._writers, self._views = Writers(self._memories), Views(self._memories)
        self.life = -1
        """The number of this partition; one that is made under the same name later has another. -1 before its first use."""
        self._counters: StatsReader | None = None
        self._lock = asyncio.Lock()  # held while this process opens the partition or asks for room
        self._records: OrderedDict[tuple[str, int, int], Record] = OrderedDict()
        self._num_dropped = 0
        self._owed: dict[tuple[Any, ...], None] = {}  # single steps only: a batch may be acknowledged on another thread
        self._sending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop

    async def opened(self) -> None:
        """Make or find the partition, and take over the rings that an earlier incarnation of this process left."""
        if self.life >= 0:
            return
        async with self._lock:
            if self.life >= 0:
                return
            answer = await self._call("part_open", self.name, self._settings or None, self.member.rank)
            self._loop = asyncio.get_running_loop()
            self._counters = StatsReader(self._memories.segment(stats_name(answer["part"]), 0))
            self.life = answer["part"]
            self._write_to(answer["rings"])

    def _write_to(self, rings: list[str]) -> None:
        """These are this process's rings now."""
        self._writers.keep(rings.__contains__)
        for ring in rings:
            self._writers[ring]

    async def ask(self, method: str, *arguments: Any, deadline_s: float = 60.0) -> Any:
        """A call about this partition, with what is owed."""
        await self.opened()
        acks = list(self._owed)
        try:
            answer = await self._call(method, self.life, acks, *arguments, deadline_s=deadline_s)
        except Closed:
            if self._state == DROPPED:
                self._forget()
            raise
        for ack in acks:
            self._owed.pop(ack, None)
        return answer

    @property
    def _state(self) -> int:
        return self._counters.state if self._counters is not None else NEW

    def stats(self) -> PartitionStats:
        """Counters from shared memory, without a call. Raises Closed before the first use of the partition."""
        if self._counters is None:
            raise Closed(
                f"partition {self.name} must be open for its counters, got one not used yet. Await `opened()`."
            )
        return self._counters.read()

    async def flush(self) -> None:
        """Send every acknowledgement that no call has taken along."""
        if self._owed:
            await self.ask("part_ack")

    def owe(self, ack: tuple[Any, ...], *, soon: bool) -> None:
        """An acknowledgement to send with the next call, or `soon`, as a call of its own. From any thread."""
        self._owed[ack] = None
        if soon:
            self._loop.call_soon_threadsafe(self._send_soon)

    def _send_soon(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        with suppress(RondoError):  # what could not be sent is still owed: the next call raises why
            while self._owed:
                await self.flush()

    async def records(self, answer: Mapping[str, Any]) -> list[Record]:
        """The records of an answer, mapped. Raises CorruptData when one is not there any more."""
        if answer["dropped"] != self._num_dropped:
            left = await self.ask("part_rings")
            self._records = OrderedDict((name, record) for name, record in self._records.items() if name[0] in left)
            self._views.keep(left.__contains__)
            self._num_dropped = answer["dropped"]
        return [self._record(ring, pos, seq) for ring, pos, seq in answer["records"]]

    def _record(self, ring: str, pos: int, seq: int) -> Record:
        record = self._records.get((ring, pos, seq))
        if record is not None and record.valid():
            self._records.move_to_end((ring, pos, seq))
            return record
        record = self._records[ring, pos, seq] = self._views[ring].read(pos, seq)
        if len(self._records) > _KEPT_RECORDS:
            self._records.popitem(last=False)
        return record

    def _forget(self) -> None:
        self._writers.close()
        self._records.clear()
        self._views.close()
        self._owed.clear()
        if self._counters is not None:
            self._counters.close()
        self._counters, self.life, self._num_dropped = None, -1, 0

    def close(self) -> None:
        """Let go of all memory; rows and records stay. Acknowledgements that were not sent are not: their rows come again."""
        if self._sending is not None:
            self._sending.cancel()
        self._forget()
