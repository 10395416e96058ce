"""The coordinator of partitions: what a member may ask, who waits for what, and the journal of it.

Owns the shell around the fold: doorbells and calls come in, events are applied and go into the journal, and only then tails
move, counters are shown, and answers go. Decides nothing that the fold does not record. Rings are `room.py`'s, batches are
planned in `planning.py`, `places.py` says where rows lie.

    doorbell or call -> events -> fold -> journal -> tails, counters, the waiters whom it can help

A question names its member and incarnation, its partition, and the batches that the caller is done with, which count before it is
answered. Every endpoint gives the same answer twice, so a caller that lost the connection asks again.

Invariants: no answer goes out before everything is in the journal; a waiter is asked again only after what can help it, so a put
costs the same whether somebody waits for something else or not; what a call sees includes every put that had returned before it
(rings are looked at again where it matters).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from rondo.comm.bus.journal import Event, Journal
from rondo.comm.bus.pending import Pending
from rondo.comm.bus.wakes import Wakes
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.places import common_columns, facts, places, with_columns
from rondo.comm.partitions.planning import next_index, plan, planned
from rondo.comm.partitions.reading import Reading, Who
from rondo.comm.partitions.room import Room
from rondo.comm.partitions.runs import ROW_MASK, compress, row_id
from rondo.comm.partitions.spec import Spec, load_sampler
from rondo.comm.partitions.stats import MAX_NAME_BYTES, MAX_TASKS
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import CLAIMED, DONE, READY, WAITING, Runs
from rondo.comm.ring.ring import ring_bytes
from rondo.comm.ring.views import Segments
from rondo.runtime.actors.actor import Actor, endpoint
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import Closed, ConfigError, Refused
from rondo.runtime.records.telling import telling

P = ParamSpec("P")
T = TypeVar("T")
Rows = list[int | str]
"""Ids and keys."""

_PAGE_ROWS = 65_536
_TICK_S = 0.5


def question(
    method: Callable[Concatenate[PartitionCoordinator, Who, Table, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[PartitionCoordinator, str, int, int, list[list[Any]], P], Coroutine[Any, Any, T]]:
    """An endpoint for living members about a partition, whose answer waits for the journal. `acks` are (task, consumer, rank,
    peer, batch) each: the caller is done with these rows and holds no view of them any more."""

    @functools.wraps(method)
    async def checked(
        self: PartitionCoordinator,
        member: str,
        incarnation: int,
        part: int,
        acks: list[list[Any]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        who = Who(member, incarnation)
        self.check(who)
        table = self.table(part)
        self.acknowledge(table, who, acks)
        answer = await method(self, who, table, *args, **kwargs)
        self.pending.check()
        return answer

    return endpoint(checked)


class PartitionCoordinator(Actor):
    def __init__(self, journal: Journal, segments: Segments, supervisor: ActorRef) -> None:
        self.fold = Fold()
        for event in journal.replay():
            self.fold.apply(event)
        self.wakes = Wakes()
        self._reports: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.pending = Pending(journal, self.fold.dump, lambda kind, data: self._reports.put_nowait((kind, data)))
        self._room = Room(self.fold, segments, self._emit, lambda: self.wakes.wake_all())
        self._supervisor = supervisor

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open what the journal says exists, and hear who lives and who has died meanwhile."""
        self._room.start()
        roster = await self._supervisor.call("roster", deadline_s=30, retry=True)
        for member, incarnation in roster["dead"]:
            await self.member_dead(member, incarnation)
        for member, life in roster["groups"].items():
            if life["alive"]:
                await self.member_started(member, life["incarnation"], 0)
        self._let_go_idle()

    def close(self) -> None:
        """Stop listening to doorbells; memory stays where it is."""
        self._room.close()

    def tick(self) -> None:
        """Goes on where the journal waited for room and has some."""
        if self.pending.waits and self.pending.goes_on():
            self._let_out()
            self.wakes.wake_all()

    async def ticking(self) -> None:
        while True:
            self.tick()
            while not self._reports.empty():
                with telling("reports"):
                    await self._supervisor.call("report", "partitions", *self._reports.get_nowait(), deadline_s=30)
            await asyncio.sleep(_TICK_S)

    @endpoint
    async def member_started(self, member: str, incarnation: int, num_ranks: int) -> None:
        if self.fold.members.get(member, [-1])[0] < incarnation:
            self._emit({"event": "started", "member": member, "incarnation": incarnation})

    @endpoint
    async def member_dead(self, member: str, incarnation: int, left: bool = False) -> None:
        """Every process of this incarnation is gone: what it put stays, what it had claimed comes again, to whoever waits, and
        its empty rings are let go."""
        if self.fold.lives(member, incarnation):
            for table in list(self.fold.tables.values()):
                self._room.read(table, member, once_more=True)
            self._emit({"event": "dead", "member": member, "incarnation": incarnation})
            self._let_go_idle()

    def _let_go_idle(self) -> None:
        for table in list(self.fold.tables.values()):
            self._room.drop_idle(table)
        self.wakes.wake_all()

    @endpoint
    async def stats(self) -> dict[str, Any]:
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

    # ---- partitions -------------------------------------------------------------------------------------------------

    @endpoint
    async def part_open(
        self, member: str, incarnation: int, name: str, spec: dict[str, Any] | None, rank: int
    ) -> dict[str, Any]:
        """The partition of this name, made at the first call: its id, and the caller's rings in it."""
        self.check(Who(member, incarnation))
        table = self._named(name, spec or {})
        self.pending.check()
        return {"part": table.id, "rings": table.shelf.of(member, rank)}

    def _named(self, name: str, wanted: dict[str, Any]) -> Table:
        id = self.fold.names.get(name)
        if id is None:
            if not name:
                raise ConfigError("a partition must have a name, got ''.")
            self._emit({"event": "new", "part": self.fold.next_id, "name": name, "spec": Spec.load(wanted).dump()})
            table = self.fold.tables[self.fold.names[name]]
            self._room.show(table)
            return table
        table = self.fold.tables[id]
        known = table.spec.dump()
        differing = [f"{key} {known[key]}" for key, value in wanted.items() if known[key] != value]
        if differing:
            raise Refused(
                f"partition {name} must keep the settings that it was made with ({', '.join(differing)}), got {wanted}. "
                "Name it without settings, or drop it first."
            )
        return table

    def table(self, part: int) -> Table:
        """Raises Closed for a partition that was dropped."""
        table = self.fold.tables.get(part)
        if table is None:
            raise Closed(f"partition {part} must be there, got one that was dropped. Ask the bus for it again.")
        return table

    @question
    async def part_room(self, who: Who, table: Table, rank: int, num_bytes: int) -> list[str]:
        """The caller's rings, one of which takes so many bytes now; waits until there is room."""
        most = max(table.spec.capacity_bytes, table.spec.ring_bytes)
        if ring_bytes(num_bytes) > most:
            raise ConfigError(
                f"a put into partition {table.name} must fit its capacity of {most} bytes, got {num_bytes}. "
                "Put fewer rows at a time, or make the partition larger."
            )
        return await self._until(table, lambda: self._room.find(table, who.member, rank, num_bytes), str(table.id))

    @question
    async def part_rings(self, who: Who, table: Table) -> list[str]:
        """Every ring there is: what a reader mapped beyond these is gone."""
        return list(table.shelf.rings)

    @question
    async def part_end(self, who: Who, table: Table, rank: int) -> None:
        """This producer puts no more rows; its puts up to here are in."""
        self._room.read(table)
        if f"{who.member}/{rank}" not in table.ended_by:
            self._change(table, "end", who=f"{who.member}/{rank}")

    @question
    async def part_drop(self, who: Who, table: Table) -> None:
        """The partition is gone at once, for everybody; its memory returns as readers let go."""
        self._change(table, "drop")

    @question
    async def part_ack(self, who: Who, table: Table) -> None:
        """Nothing but what every question acknowledges."""

    # ---- tasks ------------------------------------------------------------------------------------------------------

    @question
    async def part_task(self, who: Who, table: Table, reading: dict[str, Any], sampler: dict[str, Any]) -> list[int]:
        """Open a task, whose columns and sampler the first one fixes; the first batch that this reader has not acknowledged, and
        its pass."""
        load_sampler(sampler)
        how = Reading(**reading)
        name, columns, task = how.task, how.columns, table.tasks.get(how.task)
        if task is None:
            if not 0 < len(name.encode()) <= MAX_NAME_BYTES or len(table.tasks) >= MAX_TASKS:
                raise ConfigError(
                    f"a task must have a name of 1 to {MAX_NAME_BYTES} bytes and be one of at most {MAX_TASKS}, "
                    f"got {name!r} beside {len(table.tasks)}. Use `reset` for another pass."
                )
            self._change(table, "task", task=name, columns=columns, sampler=sampler)
        elif task.columns != columns or task.sampler != sampler:
            raise Refused(
                f"task {name} of partition {table.name} must keep its columns {task.columns} and its sampler {task.sampler}, "
                f"got {columns} and {sampler}. Use another task name."
            )
        return next_index(table.tasks[name], who.scope(how.consumer), how)

    @question
    async def part_claim(
        self, who: Who, table: Table, reading: dict[str, Any], index: int, version: int | None
    ) -> dict[str, Any]:
        """The reader's rows of batch `index`: {"batch": ...}, or {"end"} for every rank. Waits."""
        how = Reading(**reading)
        task, scope, topic = table.tasks[how.task], who.scope(how.consumer), f"{table.id}/{how.task}"
        same = (topic, scope, index, version, how.ranks, how.batch, how.until, how.partial)

        def answer(*, again: bool = True) -> tuple[Runs | None] | None:
            self.check(who)  # what the dead claim would come back to nobody
            found = planned(task, scope, how, index)
            if found is not None or (again and self.wakes.is_vain(same, topic)):
                return found
            event = plan(table, task, who.member, scope, how, index, version)
            if event is None:
                self.wakes.in_vain(same, topic)
                return None
            self._emit(event)
            self.wakes.wake([topic])  # other ranks, which may have asked with another `version` or `partial`
            return planned(task, scope, how, index)

        began, found = time.perf_counter(), answer(again=False)
        if found is None:
            self._room.read(table)
            found = await self._until(table, answer, topic)
        runs: Runs | None = found[0]
        if runs is None:
            return {"end": True}
        self.table(table.id)  # it may have been dropped since
        self._room.stats[table.id].waited(how.task, time.perf_counter() - began)
        return {"batch": places(table, runs, how.columns)}

    def acknowledge(self, table: Table, who: Who, acks: list[list[Any]]) -> None:
        """These batches are read."""
        for name, consumer, rank, peer, k in acks:
            scope = who.scope(consumer)
            claim = table.tasks[name].claims.get((scope, k))
            if claim is not None and peer not in claim.acked[rank]:
                self._change(table, "ack", task=name, scope=scope, k=k, rank=rank, peer=peer)

    @question
    async def part_reset(self, who: Who, table: Table, name: str, to: int) -> int:
        """Begin pass `to` of a task unless it has begun: what was read is ready again. The pass it is in."""
        task = table.tasks[name]
        if task.num_passes < to:
            self._change(table, "reset", task=name, to=to)
        return task.num_passes

    @question
    async def part_tasks(self, who: Who, table: Table) -> list[dict[str, Any]]:
        """Every task with what it has read, for a checkpoint: {name, columns, sampler, num_passes, done: runs}."""
        return [
            {
                "name": task.name, "columns": task.columns, "sampler": task.sampler, "num_passes": task.num_passes,
                "done": list(task.runs(DONE)),
            }
            for task in table.tasks.values()
        ]  # fmt: skip

    # ---- rows -------------------------------------------------------------------------------------------------------

    @question
    async def part_get(
        self, who: Who, table: Table, rows: Rows, columns: list[str] | None, wait: bool
    ) -> dict[str, Any]:
        """Where these rows' columns lie (None: those that all have); `wait` until they are there, else KeyError."""
        self._room.read(table)

        def there(row: int | str) -> bool:
            id = table.find(row)
            return id >= 0 and bool(table.entry(id).having(columns or (), [id & ROW_MASK]))

        def answer() -> dict[str, Any] | None:
            if wait and not all(map(there, rows)):
                return None
            ids = _ids(table, rows)
            return places(table, compress(ids), common_columns(table, ids) if columns is None else columns)

        return await self._until(table, answer, str(table.id))

    @question
    async def part_list(self, who: Who, table: Table, tags: dict[str, Any], since: int, limit: int) -> dict[str, Any]:
        """Rows with all these tags that changed after `since`: ids, what was said of them, and the cursor to go on from."""
        self._room.read(table)
        ids, cursor = table.with_tags(tags, since) if tags else table.changes(since, min(limit, _PAGE_ROWS))
        runs, columns = with_columns(table, compress(ids))
        return {"rows": runs, "columns": columns, "cursor": cursor, **facts(table, runs)}

    @question
    async def part_tag(self, who: Who, table: Table, rows: Rows, tags: dict[str, Any]) -> None:
        """Merge tags into those of these rows; None takes one away. KeyError when one is not there."""
        self._room.read(table)
        self._change(table, "tag", rows=compress(_ids(table, rows)), tags=tags)

    @question
    async def part_clear(self, who: Who, table: Table, rows: Rows | None) -> int:
        """These rows are gone (None: all that are there now); those that were not there are not missed. How many there were."""
        self._room.read(table)  # also where all are known: a second put of a key, seen later, would make it anew
        if rows is None:
            ids = [row_id(e.num, i) for e in table.entries.values() for i, live in enumerate(e.live) if live]
        else:
            ids = [id for id in dict.fromkeys(map(table.find, rows)) if id >= 0]
        if ids:
            self._change(table, "clear", rows=compress(ids))
        return len(ids)

    # ---- events and waiting -----------------------------------------------------------------------------------------

    def check(self, who: Who) -> None:
        """Raises Refused for a caller that is dead, NotYet while nobody gets anything."""
        self.pending.check_room()
        if not self.fold.lives(*who):
            raise Refused(
                f"caller must be the living incarnation of {who.member}, got {who.incarnation}. "
                "The supervisor has replaced this process; it ends."
            )

    def _change(self, table: Table, do: str, **fields: Any) -> None:
        self._emit({"event": do, "part": table.id, **fields})

    def _emit(self, *events: Event) -> None:
        for event in events:
            self.fold.apply(event)
            self.pending.add(event)
        if events:
            self._let_out()

    def _let_out(self) -> None:
        """What events leave to do, once all are in the journal."""
        if not self.pending.write():
            return
        if self.fold.dropped:
            self._room.bury()
            self.wakes.wake_all()
        touched, self.fold.touched = self.fold.touched, {}
        for table in touched.values():
            self._room.let_out(table)
            news = [f"{table.id}/{task.name}" for task in table.tasks.values() if task.news]
            for task in table.tasks.values():
                task.news = False
            self.wakes.wake([str(table.id), *news])

    async def _until(self, table: Table, answer: Callable[[], T | None], topic: str) -> T:
        """Ask again after every change that may help, until there is an answer; the caller's deadline cancels this. Raises Closed
        when the partition is dropped."""

        def asked() -> T | None:
            self.pending.check_room()
            self.table(table.id)
            found = answer()
            if found is not None:
                self.pending.check()
            return found

        found = asked()
        return found if found is not None else await self.wakes.wait(asked, topic)


def _ids(table: Table, rows: Rows) -> list[int]:
    """Raises KeyError when one of these rows is not there."""
    ids = list(map(table.find, rows))
    if -1 in ids:
        missing = [row for row, id in zip(rows, ids, strict=True) if id < 0]
        raise KeyError(f"rows of partition {table.name} must be there, got {missing[:8]!r}.")
    return ids
