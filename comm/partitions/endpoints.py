"""The coordinator of partitions: what a member may ask, and in which words.

Owns its journal, who lives, and the wire's side of every question: who may call, arguments in, answers out; `service.py` does
the work. Every endpoint gives the same answer twice, so a caller that lost the connection asks again. `who` is (member,
incarnation), checked first at every call; no answer goes out before everything is in the journal.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from rondo.comm.bus.journal import Journal
from rondo.comm.bus.pending import Pending
from rondo.comm.partitions.entry import places_of
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.places import common_columns, facts, places, with_columns
from rondo.comm.partitions.runs import ROW_BITS, compress, row_id
from rondo.comm.partitions.service import PartitionService, Reader, Want
from rondo.comm.partitions.spec import load_sampler
from rondo.comm.ring.views import Segments
from rondo.runtime.actors.actor import Actor, endpoint
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import ConfigError, Refused
from rondo.runtime.records.telling import telling

P = ParamSpec("P")
T = TypeVar("T")

_PAGE_ROWS = 65_536
_TICK_S = 0.5


class Who(NamedTuple):
    """The caller."""

    member: str
    incarnation: int

    def reader(self, task: str, fields: list[Any]) -> Reader:
        """This caller as a reader of a task: `fields` are scope, rank, ranks, peer, peers."""
        scope, rank, ranks, peer, peers = fields
        life = f"{self.member}.{self.incarnation}{'/' if scope else ''}{scope}"
        return Reader(task, life, self.member, rank, ranks, peer, peers)


def question(
    method: Callable[Concatenate[PartitionCoordinator, Who, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[PartitionCoordinator, str, int, P], Coroutine[Any, Any, T]]:
    """An endpoint for living members, whose answer waits for the journal."""

    @functools.wraps(method)
    async def checked(
        self: PartitionCoordinator, member: str, incarnation: int, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        who = Who(member, incarnation)
        self._check(who)
        answer = await method(self, who, *args, **kwargs)
        self._pending.check()
        return answer

    return endpoint(checked)


class PartitionCoordinator(Actor):
    def __init__(self, journal: Journal, segments: Segments, supervisor: ActorRef) -> None:
        self.fold = Fold()
        for event in journal.replay():
            self.fold.apply(event)
        self._reports: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._pending = Pending(
            journal, lambda: self.fold.dump(), lambda kind, data: self._reports.put_nowait((kind, data))
        )
        self.service = PartitionService(self.fold, self._pending, segments)
        self._supervisor = supervisor

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open what the journal says exists, and hear who lives and who has died meanwhile."""
        self.service.start()
        roster = await self._supervisor.call("roster", deadline_s=30, retry=True)
        for member, incarnation in roster["dead"]:
            self.service.died(member, incarnation)
        for member, life in roster["groups"].items():
            if life["alive"]:
                self.service.started(member, life["incarnation"])
        self.service.bury_rings()

    def close(self) -> None:
        """Stop listening to doorbells; memory stays where it is."""
        self.service.close()

    def tick(self) -> None:
        """Goes on where the journal waited for room and has some."""
        if self._pending.waits and self._pending.goes_on():
            self.service.let_out()
            self.service.wakes.wake_all()

    async def ticking(self) -> None:
        while True:
            self.tick()
            while not self._reports.empty():
                with telling("reports"):
                    await self._supervisor.call("report", "partitions", *self._reports.get_nowait(), deadline_s=30)
            await asyncio.sleep(_TICK_S)

    def _check(self, who: Who) -> None:
        self._pending.check_room()
        if not self.fold.lives(*who):
            raise Refused(
                f"caller must be the living incarnation of {who.member}, got {who.incarnation}. "
                "The supervisor has replaced this process; it ends."
            )

    @endpoint
    async def member_started(self, member: str, incarnation: int, num_ranks: int) -> None:
        self.service.started(member, incarnation)

    @endpoint
    async def member_dead(self, member: str, incarnation: int) -> None:
        """Every process of this incarnation is gone: what it put stays, what it had claimed comes again."""
        self.service.died(member, incarnation)

    @endpoint
    async def stats(self) -> dict[str, Any]:
        return self.service.status()

    # ---- partitions -------------------------------------------------------------------------------------------------

    @question
    async def part_open(self, who: Who, name: str, spec: dict[str, Any] | None, rank: int) -> dict[str, Any]:
        """The partition of this name, made at the first call: its id, its settings, and the caller's rings in it."""
        table = self.service.open(name, spec)
        return {"part": table.id, "spec": table.spec.dump(), "rings": table.shelf.of(who.member, rank)}

    @question
    async def part_room(self, who: Who, part: int, rank: int, num_bytes: int) -> list[str]:
        """The caller's rings, one of which takes so many bytes now; waits until there is room."""
        return await self.service.room(part, who.member, rank, num_bytes)

    @question
    async def part_rings(self, who: Who, part: int) -> list[str]:
        """Every ring there is: what a reader mapped beyond these is gone."""
        return list(self.service.table(part).shelf.rings)

    @question
    async def part_end(self, who: Who, part: int, rank: int) -> None:
        """This producer puts no more rows; its puts up to here are in."""
        table, name = self.service.table(part), f"{who.member}/{rank}"
        self.service.read(table)
        if name not in table.ended_by:
            self.service.change(table, "end", who=name)

    @question
    async def part_drop(self, who: Who, part: int) -> None:
        """The partition is gone; its memory returns as readers let go."""
        self.service.drop(part)

    # ---- tasks ------------------------------------------------------------------------------------------------------

    @question
    async def part_task(
        self, who: Who, part: int, task: str, columns: list[str], sampler: dict[str, Any], reader: list[Any]
    ) -> list[int]:
        """Open a task; the first batch that this reader (scope, rank, ranks, peer, peers) has not acknowledged, and its pass."""
        load_sampler(sampler)
        opened = self.service.open_task(self.service.table(part), task, columns, sampler)
        return self.service.next_index(opened, who.reader(task, reader))

    @question
    async def part_claim(
        self, who: Who, part: int, task: str, reader: list[Any], want: list[Any], acks: list[int], columns: list[str]
    ) -> dict[str, Any]:
        """Acknowledge batches `acks`, then batch `want` ([index, batch, until, partial, version]): {"batch": ...} or {"end"}."""
        asking = who.reader(task, reader)
        if not 0 <= asking.rank < asking.ranks or want[1] < 1 or want[2] not in ("end", "now"):
            raise ConfigError(
                f"a batch must be for a rank below {asking.ranks}, have at least one row and end with 'end' or 'now', "
                f"got rank {asking.rank}, {want[1]} rows and {want[2]!r}."
            )
        self._ack(part, asking, acks)
        runs = await self.service.claim(part, asking, Want(*want), lambda: self._check(who))
        return {"end": True} if runs is None else {"batch": places(self.service.table(part), runs, columns)}

    @question
    async def part_ack(self, who: Who, part: int, task: str, reader: list[Any], acks: list[int]) -> None:
        """This reader is done with these batches and holds no view of them any more."""
        self._ack(part, who.reader(task, reader), acks)

    def _ack(self, part: int, reader: Reader, acks: list[int]) -> None:
        table = self.service.table(part)
        for index in acks:
            claim = table.tasks[reader.task].claims.get((reader.scope, index))
            if claim is not None and reader.peer not in claim.acked[reader.rank]:
                self.service.change(
                    table, "ack", task=reader.task, scope=reader.scope, k=index, rank=reader.rank, peer=reader.peer
                )

    @question
    async def part_reset(self, who: Who, part: int, task: str, to: int) -> int:
        """Begin pass `to` of a task unless it has begun: what was read is ready again. The pass it is in."""
        table = self.service.table(part)
        if table.tasks[task].num_passes < to:
            self.service.change(table, "reset", task=task, to=to)
        return table.tasks[task].num_passes

    @question
    async def part_tasks(self, who: Who, part: int) -> list[dict[str, Any]]:
        """Every task with what it has read, for a checkpoint: {name, columns, sampler, num_passes, done: runs}."""
        return [
            {
                "name": task.name, "columns": task.columns, "sampler": task.sampler, "num_passes": task.num_passes,
                "done": task.done_runs(),
            }
            for task in self.service.table(part).tasks.values()
        ]  # fmt: skip

    # ---- rows -------------------------------------------------------------------------------------------------------

    @question
    async def part_get(
        self, who: Who, part: int, rows: list[int | str], columns: list[str] | None, wait: bool
    ) -> dict[str, Any]:
        """Where these rows' columns lie (None: those that all have); `wait` until they are there, else KeyError."""
        ids = await self.service.existing(part, rows, columns, wait=wait)
        table = self.service.table(part)
        return places(table, compress(ids), common_columns(table, ids) if columns is None else columns)

    @question
    async def part_list(self, who: Who, part: int, tags: dict[str, Any], since: int, limit: int) -> dict[str, Any]:
        """Rows with all these tags that changed after `since`: ids, what was said of them, and the cursor to go on from."""
        table = self.service.table(part)
        self.service.read(table)
        if tags:
            ids, cursor, whole = table.with_tags(tags, since)
        else:
            ids, cursor, whole = table.changes(since, min(limit, _PAGE_ROWS))
        runs, columns = with_columns(table, compress(ids))
        parts = [(table.entries[run[0] >> ROW_BITS], *places_of(run[0], run[1])[1:]) for run in runs]
        return {"rows": runs, "columns": columns, "cursor": cursor, "whole": whole, **facts(parts)}

    @question
    async def part_tag(self, who: Who, part: int, rows: list[int | str], tags: dict[str, Any]) -> None:
        """Merge tags into those of these rows; None takes one away. KeyError when one is not there."""
        ids = await self.service.existing(part, rows, None, wait=False)
        self.service.change(self.service.table(part), "tag", rows=compress(ids), tags=tags)

    @question
    async def part_clear(self, who: Who, part: int, rows: list[int | str] | None) -> int:
        """These rows are gone (None: all that are there now); those that were not there are not missed. How many there were."""
        table = self.service.table(part)
        self.service.read(table)  # also where all are known: a second put of a key, seen later, would make it anew
        if rows is None:
            ids = [id for e in table.entries.values() for i in range(e.n) if table.live(id := row_id(e.num, i))]
        else:
            ids = list(dict.fromkeys(self.service.resolve(table, rows)[0]))
        if ids:
            self.service.change(table, "clear", rows=compress(ids))
        return len(ids)
