"""Partitions as their coordinator runs them: their rings, who waits for what, and the claims that are planned.

Owns the shell around the fold: doorbells and calls come in, events are applied and go into the journal, and only then tails
move, counters are shown, and answers go. Decides nothing that the fold does not record. The endpoints that call it are in
`endpoints.py`.

    doorbell or call -> events -> fold -> journal -> tails, counters, the waiters whom it can help

Invariants: a waiter is asked again only after what can help it, so a put costs the same whether somebody waits for something
else or not; what a call sees includes every put that had returned before it (rings are looked at again where it matters).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.comm.bus.journal import Event
from rondo.comm.bus.pending import Pending
from rondo.comm.bus.rings import Rings
from rondo.comm.bus.wakes import Wakes
from rondo.comm.partitions.choosers import chooser
from rondo.comm.partitions.fold import Fold, put_event
from rondo.comm.partitions.memory import FILE, Memories
from rondo.comm.partitions.runs import ROW_MASK
from rondo.comm.partitions.samplers import Ask
from rondo.comm.partitions.spec import Spec
from rondo.comm.partitions.stats import MAX_NAME_BYTES, MAX_TASKS, STATS_BYTES, StatsWriter, stats_name
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import CLAIMED, DONE, READY, WAITING, Task
from rondo.comm.partitions.waited import Waited
from rondo.comm.ring.ring import fits, ring_bytes
from rondo.comm.ring.views import Segments
from rondo.runtime.errors import Closed, ConfigError, Refused, SamplerFailed

_EVERY = 8  # waits between two looks at the percentiles, which cost more than a count
_BURY_RECORDS = 1000  # how many records of a dropped partition are let go in one turn of the loop

Runs = list[list[int]]


@dataclass(frozen=True, slots=True)
class Reader:
    """Who asks for a batch: `peer` of `peers` on data-parallel rank `rank` of `ranks`, in one scope of a task."""

    task: str
    scope: str
    member: str
    rank: int
    ranks: int
    peer: int
    peers: int


@dataclass(frozen=True, slots=True)
class Want:
    """How a batch shall be: at most `batch` rows a rank; `until` "now" ends with what is ready, "end" with the partition."""

    index: int
    batch: int
    until: str
    partial: bool
    version: int | None  # None: the newest that a row was put with


class PartitionService:
    def __init__(
        self, fold: Fold, pending: Pending, segments: Segments, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.fold = fold
        self.wakes = Wakes()
        self._pending = pending
        self._memories = Memories(segments)
        self._rings = Rings(self._memories, self._seen, lambda: self.wakes.wake_all(), put_event)
        self._stats: dict[int, StatsWriter] = {}
        self._clock = clock
        self._waited: dict[tuple[int, str], Waited] = {}

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open what the fold knows and read what came while nobody did."""
        for table in self.fold.dropped:  # perhaps by one that died before it had given their memory back
            for name in (*table.shelf.rings, stats_name(table.id)):
                self._memories.drop(name)
        self.fold.dropped.clear()
        for table in self.fold.tables.values():
            for name, ring in table.shelf.rings.items():
                self._rings.open(name, known=ring)
            self._show(table)
            self.read(table, once_more=True)

    def close(self) -> None:
        """Stop listening; memory stays where it is."""
        self._rings.close()
        for writer in self._stats.values():
            writer.close()

    def started(self, member: str, incarnation: int) -> None:
        if self.fold.members.get(member, [-1])[0] < incarnation:
            self.emit({"event": "started", "member": member, "incarnation": incarnation})

    def died(self, member: str, incarnation: int) -> None:
        """What it put up to its death is seen; whoever waits may get what it had claimed, and its empty rings are let go."""
        if self.fold.lives(member, incarnation):
            for table in list(self.fold.tables.values()):
                self.emit(*self._rings.read(table.shelf.of(member), once_more=True))
            self.emit({"event": "dead", "member": member, "incarnation": incarnation})
            self.bury_rings()

    def bury_rings(self) -> None:
        """Empty rings of the dead are let go."""
        for table in list(self.fold.tables.values()):
            self._drop_idle(table)
        self.wakes.wake_all()

    # ---- partitions -------------------------------------------------------------------------------------------------

    def open(self, name: str, spec: dict[str, Any] | None) -> Table:
        """The partition of this name; made now if it is new."""
        id = self.fold.names.get(name)
        if id is None:
            if not name:
                raise ConfigError("a partition must have a name, got ''.")
            wanted, id = Spec.load(spec or {}), self.fold.next_id
            self.emit({"event": "new", "part": id, "name": name, "spec": wanted.dump()})
            self._show(self.fold.tables[id])
            return self.fold.tables[id]
        table = self.fold.tables[id]
        known = table.spec.dump()
        differing = [f"{key} {known[key]}" for key, value in (spec or {}).items() if known[key] != value]
        if differing:
            raise Refused(
                f"partition {name} must keep the settings that it was made with ({', '.join(differing)}), got {spec}. "
                "Name it without settings, or drop it first."
            )
        return table

    def table(self, part: int) -> Table:
        """Raises Closed for a partition that was dropped."""
        table = self.fold.tables.get(part)
        if table is None:
            raise Closed(f"partition {part} must be there, got one that was dropped. Ask the bus for it again.")
        return table

    def drop(self, part: int) -> None:
        """Gone at once for everybody; its rings return to the system, its rows are let go bit by bit."""
        if part not in self.fold.tables:
            return
        self.emit({"event": "drop", "part": part})
        for table in self.fold.dropped:
            self._stats.pop(table.id).close(dropped=True)
            self._waited = {at: waited for at, waited in self._waited.items() if at[0] != table.id}
            for ring in table.shelf.rings:
                self._rings.drop(ring)
            self._rings.forget(f"part/{table.id}/")
            self._memories.drop(stats_name(table.id))
            self._bury(table)
        self.fold.dropped.clear()
        self.wakes.wake_all()

    def _bury(self, table: Table) -> None:
        """Python objects of 100,000 rows take tens of milliseconds to go: a thousand records a turn do not stop the loop."""
        for _ in range(min(_BURY_RECORDS, len(table.entries))):
            num, _entry = table.entries.popitem()
            for task in table.tasks.values():
                task.states.pop(num, None)
        if table.entries:
            asyncio.get_running_loop().call_soon(self._bury, table)

    def status(self) -> dict[str, Any]:
        """Every partition by name, for metrics and the admin endpoint; O(tasks), never a scan of rows."""
        return {
            table.name: {
                "rows": table.num_rows, "live_bytes": table.shelf.live_bytes, "ring_bytes": table.shelf.ring_bytes,
                "put": table.num_put, "refused": table.num_refused, "ended": table.ended,
                "tasks": {
                    name: {
                        "ready": task.counts[READY], "waiting": task.counts[WAITING], "claimed": task.counts[CLAIMED],
                        "done": task.counts[DONE], "returned": task.num_returned,
                    }
                    for name, task in table.tasks.items()
                },
            }
            for table in self.fold.tables.values()
        }  # fmt: skip

    # ---- rings ------------------------------------------------------------------------------------------------------

    def read(self, table: Table, *, once_more: bool = False) -> None:
        """See every put into this partition up to now."""
        self.emit(*self._rings.read(list(table.shelf.rings), once_more=once_more))

    async def room(self, part: int, member: str, rank: int, num_bytes: int) -> list[str]:
        """One producer's rings, one of which takes a record of so many bytes now. Waits for room.

        The producer is inside this call, so it writes in none of its rings meanwhile.
        """
        most = max(self.table(part).spec.capacity_bytes, self.table(part).spec.ring_bytes)
        if ring_bytes(num_bytes) > most:
            raise ConfigError(
                f"a put into partition {self.table(part).name} must fit its capacity of {most} bytes, got {num_bytes}. "
                "Put fewer rows at a time, or make the partition larger."
            )
        return await self._until(lambda: self._rings_with_room(self.table(part), member, rank, num_bytes), str(part))

    def _rings_with_room(self, table: Table, member: str, rank: int, num_bytes: int) -> list[str] | None:
        shelf = table.shelf
        own = shelf.of(member, rank)
        self.emit(*self._rings.read(own))
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
        self.emit({"event": "ring", "part": table.id, "ring": made, "bytes": capacity, "member": member, "rank": rank})
        return shelf.of(member, rank)

    def _drop_ring(self, table: Table, name: str) -> None:
        self.emit({"event": "unring", "part": table.id, "ring": name})
        self._rings.drop(name)

    def _drop_idle(self, table: Table) -> None:
        for name, ring in list(table.shelf.rings.items()):
            if ring.idle and not self.fold.lives(ring.owner.rpartition("/")[0]):
                self._drop_ring(table, name)

    # ---- claims -----------------------------------------------------------------------------------------------------

    def open_task(self, table: Table, name: str, columns: list[str], sampler: dict[str, Any]) -> Task:
        """The task of this name; whoever names it first fixes its columns and its sampler."""
        task = table.tasks.get(name)
        if task is None:
            if not 0 < len(name.encode()) <= MAX_NAME_BYTES or len(table.tasks) >= MAX_TASKS:
                raise ConfigError(
                    f"a task must have a name of 1 to {MAX_NAME_BYTES} bytes and be one of at most {MAX_TASKS}, "
                    f"got {name!r} beside {len(table.tasks)}. Use `reset` for another pass."
                )
            self.emit({"event": "task", "part": table.id, "task": name, "columns": columns, "sampler": sampler})
            return table.tasks[name]
        if task.columns != columns or task.sampler != sampler:
            raise Refused(
                f"task {name} of partition {table.name} must keep its columns {task.columns} and its sampler {task.sampler}, "
                f"got {columns} and {sampler}. Use another task name."
            )
        return task

    def next_index(self, task: Task, reader: Reader) -> list[int]:
        """The first batch that this reader has not acknowledged, and the pass that it belongs to."""
        scope = task.scopes.get(reader.scope)
        if scope is None:
            return [0, task.num_passes]
        open_ones = [
            k
            for (name, k), claim in task.claims.items()
            if name == reader.scope and reader.rank < len(claim.rows) and reader.peer not in claim.acked[reader.rank]
        ]
        index = min(open_ones, default=scope.next)
        return [index, scope.first_pass + sum(stop < index for stop in scope.stops)]

    async def claim(self, part: int, reader: Reader, want: Want, check: Callable[[], None]) -> Runs | None:
        """Rows of batch `want.index` for the reader, as runs; None: the stream ends here, for every rank. Waits.

        `check` raises once the reader is dead: what it claimed then would come back to nobody.
        """

        topic, plan = f"{part}/{reader.task}", (part, reader.task, reader.scope, reader.ranks, want)

        def answer(*, again: bool = True) -> tuple[Runs | None] | None:
            check()
            table = self.table(part)
            task = table.tasks[reader.task]
            found = self._planned(task, reader, want.index)
            if found is not None or (again and self.wakes.is_vain(plan, topic)):
                return found
            if self._plan(table, task, reader, want):
                self.wakes.wake([topic])  # other ranks, which may have asked with another `version` or `partial`
                return self._planned(task, reader, want.index)
            self.wakes.in_vain(plan, topic)
            return None

        began, found = self._clock(), answer(again=False)
        if found is None:
            self.read(self.table(part))
            found = await self._until(answer, topic)
        runs: Runs | None = found[0]
        if runs is not None:
            self._note_wait(part, reader.task, self._clock() - began)
        return runs

    def _note_wait(self, part: int, task: str, seconds: float) -> None:
        waited = self._waited.setdefault((part, task), Waited())
        waited.add(seconds)
        if waited.num_waits < _EVERY or not waited.num_waits % _EVERY:
            place = list(self.table(part).tasks).index(task)
            self._stats[part].waited(place, *waited.percentiles(0.5, 0.99))

    def _planned(self, task: Task, reader: Reader, index: int) -> tuple[Runs | None] | None:
        claim, scope = task.claims.get((reader.scope, index)), task.scopes.get(reader.scope)
        if claim is not None:
            if reader.ranks != len(claim.rows):
                raise Refused(f"every reader of a scope must name {len(claim.rows)} ranks, got {reader.ranks}.")
            return (claim.rows[reader.rank],)
        if scope is not None and index in scope.stops:
            return (None,)
        expected = scope.next if scope is not None else 0
        if index != expected:
            raise Refused(
                f"batch {index} of task {task.name} must be open or the next one ({expected}), got one that is "
                "acknowledged or too early. Begin the stream anew."
            )
        return None

    def _plan(self, table: Table, task: Task, reader: Reader, want: Want) -> bool:
        """Plan the scope's next batch for all its ranks; False when there is not enough yet."""
        over = table.ended and not task.counts[WAITING]
        version = table.newest_version if want.version is None else want.version
        ask = Ask(reader.ranks, want.batch, want.partial or over or want.until == "now", over, version)
        event: Event = {
            "part": table.id, "task": task.name, "scope": reader.scope, "k": want.index, "member": reader.member,
        }  # fmt: skip
        picked = None
        if task.num_ready:
            try:
                task.chooser = task.chooser or chooser(table, task)
                picked = task.chooser.pick(ask)
            except SamplerFailed:
                task.chooser = None  # made anew when somebody asks again
                raise
        if picked is not None and task.chooser is not None:
            event |= {"event": "claim", "rows": picked, "peers": reader.peers}
            if task.chooser.mark != task.mark:
                event["mark"] = task.chooser.mark
        elif want.until == "now" or (over and not task.may_come_back(reader.scope)):
            event["event"] = "stop"
        else:
            return False
        self.emit(event)
        return True

    # ---- rows -------------------------------------------------------------------------------------------------------

    def resolve(self, table: Table, rows: Iterable[int | str]) -> tuple[list[int], list[int | str]]:
        """Ids of keys and ids, and those that are not there. Puts that have returned are seen."""
        named = list(rows)
        found = [_find(table, row) for row in named]
        if -1 in found:
            self.read(table)
            found = [_find(table, row) for row in named]
        missing = [row for row, id in zip(named, found, strict=True) if id < 0]
        return [id for id in found if id >= 0], missing

    async def existing(self, part: int, rows: list[int | str], columns: list[str] | None, *, wait: bool) -> list[int]:
        """Ids of these rows, once all are there and have the columns (None: any). Raises KeyError at once without `wait`."""

        def answer() -> list[int] | None:
            table = self.table(part)
            ids, missing = self.resolve(table, rows)
            if not missing and not self._have(table, ids, columns):
                self.read(table)  # columns may have been added by a put that has returned
            if missing and not wait:
                raise KeyError(f"rows of partition {table.name} must be there, got {missing[:8]!r}.")
            return None if missing or (wait and not self._have(table, ids, columns)) else ids

        return await self._until(answer, str(part))

    def _have(self, table: Table, ids: list[int], columns: list[str] | None) -> bool:
        return all(table.entry(id).place(name, id & ROW_MASK) >= 0 for id in ids for name in columns or ())

    # ---- events and waiting -----------------------------------------------------------------------------------------

    def _seen(self, events: list[Event]) -> None:
        """Records of one ring: all of one partition."""
        self.emit(*events)

    def change(self, table: Table, do: str, **fields: Any) -> None:
        """One event of a caller: clear, tag, ack, reset, end."""
        self.emit({"event": do, "part": table.id, **fields})

    def emit(self, *events: Event) -> None:
        for event in events:
            self.fold.apply(event)
            self._pending.add(event)
        if events:
            self.let_out()

    def let_out(self) -> None:
        """What events leave to do, once all are in the journal."""
        if not self._pending.write():
            return
        touched, self.fold.touched = self.fold.touched, {}
        for table in touched.values():
            self._after(table)

    def _after(self, table: Table) -> None:
        freed, table.shelf.freed = table.shelf.freed, {}
        for name, tail in freed.items():
            self._rings.release(name, tail)
        if freed:
            self._drop_idle(table)
        if table.id in self._stats:
            self._stats[table.id].write(table)
        news = [f"{table.id}/{task.name}" for task in table.tasks.values() if task.news]
        for task in table.tasks.values():
            task.news = False
        self.wakes.wake([str(table.id), *news])

    def _show(self, table: Table) -> None:
        writer = self._stats[table.id] = StatsWriter(self._memories.segment(stats_name(table.id), STATS_BYTES))
        writer.write(table)

    async def _until(self, answer: Callable[[], Any], topic: str) -> Any:
        """Ask again after every change that may help, until there is an answer; the caller's deadline cancels this."""

        def asked() -> Any:
            self._pending.check_room()
            found = answer()
            if found is not None:
                self._pending.check()
            return found

        found = asked()
        return found if found is not None else await self.wakes.wait(asked, topic)


def _find(table: Table, row: int | str) -> int:
    if isinstance(row, str):
        return table.keys.get(row, -1)
    return row if table.live(row) else -1
