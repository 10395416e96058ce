"""Broadcast: one writer, any number of readers that may be slow or gone; nobody waits for anybody.

Owns the readers' queues. Each is bounded: a reader that falls behind loses its oldest records, is told how many in the
next one it gets (`"missed": n`), and the writer never notices. Closing ends every reader's loop. Event loop only.

    broadcast.publish({"kind": "step", "step": 3})
    async for record in broadcast.subscribe(): ...
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator
from typing import Any

Record = dict[str, Any]


class _Reader:
    __slots__ = ("missed", "records", "wake")

    def __init__(self, capacity: int) -> None:
        self.records: collections.deque[Record] = collections.deque(maxlen=capacity)
        self.missed = 0
        self.wake = asyncio.Event()


class Broadcast:
    """Fans records out. `capacity` bounds each reader's queue, in records."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._readers: set[_Reader] = set()
        self._closed = False

    def publish(self, record: Record) -> None:
        """Hands a record to every reader; returns at once."""
        for reader in self._readers:
            if len(reader.records) == self._capacity:
                reader.missed += 1
            reader.records.append(record)
            reader.wake.set()

    async def subscribe(self) -> AsyncIterator[Record]:
        """The records published from the first step of the loop on, until `close`."""
        reader = _Reader(self._capacity)
        self._readers.add(reader)
        try:
            while True:
                while reader.records:
                    record = reader.records.popleft()
                    if reader.missed:
                        record = {**record, "missed": reader.missed}
                        reader.missed = 0
                    yield record
                if self._closed:
                    return
                reader.wake.clear()
                await reader.wake.wait()
        finally:
            self._readers.discard(reader)

    def close(self) -> None:
        """Ends every reader's loop after the records it still holds."""
        self._closed = True
        for reader in self._readers:
            reader.wake.set()
