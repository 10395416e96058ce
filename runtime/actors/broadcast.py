"""Broadcast: one writer, any number of readers that may be slow or gone; nobody waits for anybody.

Owns the readers' queues. Each is bounded: a reader that falls behind loses its oldest records, is told how many in the
next one it gets (`"missed": n`), and the writer never notices. Closing ends every reader's loop. Event loop only.

    broadcast.publish({"kind": "step", "step": 3})
    async for record in broadcast.subscribe(): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

Record = dict[str, Any]


class Broadcast:
    """Fans records out. `capacity` bounds each reader's queue, in records."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._readers: dict[asyncio.Queue[Record | None], int] = {}
        """How many records each has lost since the last that it got."""
        self._closed = False

    def publish(self, record: Record) -> None:
        """Hands a record to every reader; returns at once."""
        for reader in self._readers:
            if reader.qsize() == self._capacity:
                reader.get_nowait()
                self._readers[reader] += 1
            reader.put_nowait(record)

    async def subscribe(self) -> AsyncIterator[Record]:
        """The records published from the first step of the loop on, until `close`."""
        if self._closed:
            return
        reader: asyncio.Queue[Record | None] = asyncio.Queue()
        self._readers[reader] = 0
        try:
            while (record := await reader.get()) is not None:
                missed, self._readers[reader] = self._readers[reader], 0
                yield {**record, "missed": missed} if missed else record
        finally:
            del self._readers[reader]

    def close(self) -> None:
        """Ends every reader's loop after the records it still holds."""
        self._closed = True
        for reader in self._readers:
            reader.put_nowait(None)
