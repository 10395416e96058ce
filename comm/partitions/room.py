"""The memory of partitions as their coordinator holds it: rings with their doorbells, and counters that anybody can read.

Owns which ring a producer gets, and when one goes; a part of what is decided is in the fold (`shelf.py`), which hears of it by
events. Memory lies in segments, or in files beyond a partition's capacity (`memory.py`).

Invariant: tails move, rings go and counters are shown only behind the journal (`let_out`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from rondo.comm.bus.journal import Event
from rondo.comm.bus.rings import Rings
from rondo.comm.partitions.fold import Fold, put_event
from rondo.comm.partitions.memory import FILE, Memories
from rondo.comm.partitions.stats import STATS_BYTES, StatsWriter, stats_name
from rondo.comm.partitions.table import Table
from rondo.comm.ring.ring import fits, ring_bytes
from rondo.comm.ring.views import Segments

_BURY_RECORDS = 1000  # how many records of a dropped partition are let go in one turn of the loop


class Room:
    """`emit` takes events, `made` is called when memory that somebody waits for is there."""

    def __init__(self, fold: Fold, segments: Segments, emit: Callable[..., None], made: Callable[[], None]) -> None:
        self._fold, self._emit = fold, emit
        self._memories = Memories(segments)
        self._rings = Rings(self._memories, lambda events: emit(*events), made, put_event)
        self.stats: dict[int, StatsWriter] = {}

    def start(self) -> None:
        """Open what the fold knows and read what came while nobody did."""
        for table in self._fold.dropped:  # perhaps by one that died before it had given their memory back
            for name in (*table.shelf.rings, stats_name(table.id)):
                self._memories.drop(name)
        self._fold.dropped.clear()
        for table in self._fold.tables.values():
            for name, ring in table.shelf.rings.items():
                self._rings.open(name, known=ring)
            self.show(table)
            self.read(table, once_more=True)

    def close(self) -> None:
        """Stop listening; memory stays where it is."""
        self._rings.close()
        for writer in self.stats.values():
            writer.close()

    def show(self, table: Table) -> None:
        """A partition's counters, from now on."""
        self.stats[table.id] = StatsWriter(self._memories.segment(stats_name(table.id), STATS_BYTES))
        self.stats[table.id].write(table)

    def read(self, table: Table, member: str | None = None, *, once_more: bool = False) -> None:
        """See every put into this partition up to now; of one member, or of all."""
        rings = [name for name, ring in table.shelf.rings.items() if member in (None, _member(ring.owner))]
        self._emit(*self._rings.read(rings, once_more=once_more))

    def find(self, table: Table, member: str, rank: int, num_bytes: int) -> list[str] | None:
        """One producer's rings, one of which takes a record of so many bytes now, made where there may be one more; None: there
        is no room. The producer waits for this, so it writes in none of its rings meanwhile."""
        shelf = table.shelf
        own = shelf.of(member, rank)
        self._emit(*self._rings.read(own))
        if any(fits(r.capacity, r.head, r.tail, (), num_bytes) for r in (shelf.rings[name] for name in own)):
            return own
        size = max(table.spec.ring_bytes, ring_bytes(num_bytes))
        for name in own:  # too small, and empty: they make place for one that is large enough
            if shelf.ring_bytes + size > table.spec.capacity_bytes and shelf.rings[name].idle:
                self._drop_ring(table, name)
        producer = f"part/{table.id}/{member}.{rank}"
        taken = shelf.ring_bytes + self._rings.making_bytes(f"part/{table.id}/", producer)
        if taken + size <= table.spec.capacity_bytes or not shelf.of(member, rank):
            name = f"{producer}/{shelf.next_ring}"
        elif table.spec.spill_dir:
            name = f"{FILE}{Path(table.spec.spill_dir) / f'part-{table.id}-{shelf.next_ring}-{os.urandom(8).hex()}'}"
        else:
            return None
        made = self._rings.prepare(producer, name, size)
        if made is None:
            return None
        capacity = self._rings.open(made, size)
        self._emit({"event": "ring", "part": table.id, "ring": made, "bytes": capacity, "member": member, "rank": rank})
        return shelf.of(member, rank)

    def drop_idle(self, table: Table) -> None:
        """Empty rings of the dead are let go."""
        for name, ring in list(table.shelf.rings.items()):
            if ring.idle and not self._fold.lives(_member(ring.owner)):
                self._drop_ring(table, name)

    def _drop_ring(self, table: Table, name: str) -> None:
        event: Event = {"event": "unring", "part": table.id, "ring": name}
        self._emit(event)
        self._rings.drop(name)

    def let_out(self, table: Table) -> None:
        """What events leave to do in memory, once they are in the journal."""
        freed, table.shelf.freed = table.shelf.freed, {}
        for name, tail in freed.items():
            self._rings.release(name, tail)
        if freed:
            self.drop_idle(table)
        if table.id in self.stats:
            self.stats[table.id].write(table)

    def bury(self) -> None:
        """The memory of partitions that were dropped returns to the system, their rows go bit by bit."""
        for table in self._fold.dropped:
            self.stats.pop(table.id).drop()
            for ring in table.shelf.rings:
                self._rings.drop(ring)
            self._rings.forget(f"part/{table.id}/")
            self._memories.drop(stats_name(table.id))
            self._let_go(table)
        self._fold.dropped.clear()

    def _let_go(self, table: Table) -> None:
        """Python objects of 100,000 rows take tens of milliseconds to go: a thousand records a turn do not stop the loop."""
        for _ in range(min(_BURY_RECORDS, len(table.entries))):
            num, _entry = table.entries.popitem()
            for task in table.tasks.values():
                task.states.pop(num, None)
        if table.entries:
            asyncio.get_running_loop().call_soon(self._let_go, table)


def _member(owner: str) -> str:
    return owner.rpartition("/")[0]
