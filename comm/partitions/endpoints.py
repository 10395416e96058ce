"""The coordinator's endpoints for partitions: what a member may ask, and in which words.

Owns the wire's side alone: who may call, arguments in, answers out; `service.py` does the work. Every endpoint gives the same
answer twice, so a caller that lost the connection asks again. `who` is (member, incarnation), checked first at every call.

    class Coordinator(PartitionEndpoints, Actor): ...      it makes `self.partitions` and says who lives
"""

from __future__ import annotations

from typing import Any

from rondo.comm.partitions.entry import places_of
from rondo.comm.partitions.places import common_columns, facts, places, with_columns
from rondo.comm.partitions.runs import ROW_BITS, compress, row_id
from rondo.comm.partitions.service import PartitionService, Reader, Want
from rondo.comm.partitions.spec import load_sampler
from rondo.comm.partitions.table import Table
from rondo.runtime.actors.actor import endpoint
from rondo.runtime.errors import ConfigError

_PAGE_ROWS = 65_536


class PartitionEndpoints:
    """Mixed into the coordinator, which gives it these two."""

    partitions: PartitionService

    def _check_alive(self, member: str, incarnation: int) -> None:
        raise NotImplementedError

    @endpoint
    async def part_open(
        self, member: str, incarnation: int, name: str, spec: dict[str, Any] | None, rank: int
    ) -> dict[str, Any]:
        """The partition of this name, made at the first call: its id, its settings, and the caller's rings in it."""
        self._check_alive(member, incarnation)
        table = self.partitions.open(name, spec)
        return {"part": table.id, "spec": table.spec.dump(), "rings": table.shelf.of(member, rank)}

    @endpoint
    async def part_room(
        self, member: str, incarnation: int, part: int, rank: int, num_bytes: int
    ) -> list[str]:  # fmt: skip
        """The caller's rings, one of which takes so many bytes now; waits until there is room."""
        self._check_alive(member, incarnation)
        return await self.partitions.room(part, member, rank, num_bytes)

    @endpoint
    async def part_rings(self, member: str, incarnation: int, part: int) -> list[str]:
        """Every ring there is: what a reader mapped beyond these is gone."""
        self._check_alive(member, incarnation)
        return list(self.partitions.table(part).shelf.rings)

    @endpoint
    async def part_task(
        self, member: str, incarnation: int, part: int, task: str, columns: list[str], sampler: dict[str, Any],
        reader: list[Any],
    ) -> list[int]:  # fmt: skip
        """Open a task; the first batch that this reader (scope, rank, ranks, peer, peers) has not acknowledged, and its pass."""
        self._check_alive(member, incarnation)
        load_sampler(sampler)
        table = self.partitions.table(part)
        opened = self.partitions.open_task(table, task, columns, sampler)
        return self.partitions.next_index(opened, _reader(member, incarnation, task, reader))

    @endpoint
    async def part_claim(
        self, member: str, incarnation: int, part: int, task: str, reader: list[Any], want: list[Any],
        acks: list[int], columns: list[str],
    ) -> dict[str, Any]:  # fmt: skip
        """Acknowledge batches `acks`, then batch `want` ([index, batch, until, partial, version]): {"batch": ...} or {"end"}."""
        self._check_alive(member, incarnation)
        asking = _reader(member, incarnation, task, reader)
        if not 0 <= asking.rank < asking.ranks or want[1] < 1 or want[2] not in ("end", "now"):
            raise ConfigError(
                f"a batch must be for a rank below {asking.ranks}, have at least one row and end with 'end' or 'now', "
                f"got rank {asking.rank}, {want[1]} rows and {want[2]!r}."
            )
        for index in acks:
            self._ack(part, asking, index)
        runs = await self.partitions.claim(part, asking, Want(*want), lambda: self._check_alive(member, incarnation))
        if runs is None:
            return {"end": True}
        return {"batch": places(self.partitions.table(part), runs, columns)}

    @endpoint
    async def part_ack(
        self, member: str, incarnation: int, part: int, task: str, reader: list[Any], acks: list[int]
    ) -> None:
        """This reader is done with these batches and holds no view of them any more."""
        self._check_alive(member, incarnation)
        for index in acks:
            self._ack(part, _reader(member, incarnation, task, reader), index)

    def _ack(self, part: int, reader: Reader, index: int) -> None:
        table = self.partitions.table(part)
        claim = table.tasks[reader.task].claims.get((reader.scope, index))
        if claim is not None and reader.peer not in claim.acked[reader.rank]:
            self.partitions.change(
                table, "ack", task=reader.task, scope=reader.scope, k=index, rank=reader.rank, peer=reader.peer
            )

    @endpoint
    async def part_get(
        self, member: str, incarnation: int, part: int, rows: list[int | str], columns: list[str] | None, wait: bool
    ) -> dict[str, Any]:
        """Where these rows' columns lie (None: those that all have); `wait` until they are there, else KeyError."""
        self._check_alive(member, incarnation)
        ids = await self.partitions.existing(part, rows, columns, wait=wait)
        table = self.partitions.table(part)
        return places(table, compress(ids), common_columns(table, ids) if columns is None else columns)

    @endpoint
    async def part_list(
        self, member: str, incarnation: int, part: int, tags: dict[str, Any], since: int, limit: int
    ) -> dict[str, Any]:
        """Rows with all these tags that changed after `since`: ids, what was said of them, and the cursor to go on from."""
        self._check_alive(member, incarnation)
        table = self.partitions.table(part)
        self.partitions.read(table)
        if tags:
            ids, cursor, whole = table.with_tags(tags, since)
        else:
            ids, cursor, whole = table.changes(since, min(limit, _PAGE_ROWS))
        runs, columns = with_columns(table, compress(ids))
        parts = [(table.entries[run[0] >> ROW_BITS], *places_of(run[0], run[1])[1:]) for run in runs]
        return {"rows": runs, "columns": columns, "cursor": cursor, "whole": whole, **facts(parts)}

    @endpoint
    async def part_tag(
        self, member: str, incarnation: int, part: int, rows: list[int | str], tags: dict[str, Any]
    ) -> None:
        """Merge tags into those of these rows; None takes one away. KeyError when one is not there."""
        self._check_alive(member, incarnation)
        ids = await self.partitions.existing(part, rows, None, wait=False)
        self.partitions.change(self.partitions.table(part), "tag", rows=compress(ids), tags=tags)

    @endpoint
    async def part_clear(self, member: str, incarnation: int, part: int, rows: list[int | str] | None) -> int:
        """These rows are gone (None: all that are there now); those that were not there are not missed. How many there were."""
        self._check_alive(member, incarnation)
        table = self.partitions.table(part)
        self.partitions.read(table)  # also where all are known: a second put of a key, seen later, would make it anew
        if rows is None:
            ids = [id for entry in table.entries.values() for id in _ids(table, entry.num, entry.n)]
        else:
            ids = list(dict.fromkeys(self.partitions.resolve(table, rows)[0]))
        if ids:
            self.partitions.change(table, "clear", rows=compress(ids))
        return len(ids)

    @endpoint
    async def part_reset(self, member: str, incarnation: int, part: int, task: str, to: int) -> int:
        """Begin pass `to` of a task unless it has begun: what was read is ready again. The pass it is in."""
        self._check_alive(member, incarnation)
        table = self.partitions.table(part)
        if table.tasks[task].num_passes < to:
            self.partitions.change(table, "reset", task=task, to=to)
        return table.tasks[task].num_passes

    @endpoint
    async def part_end(self, member: str, incarnation: int, part: int, rank: int) -> None:
        """This producer puts no more rows; its puts up to here are in."""
        self._check_alive(member, incarnation)
        table, who = self.partitions.table(part), f"{member}/{rank}"
        self.partitions.read(table)
        if who not in table.ended_by:
            self.partitions.change(table, "end", who=who)

    @endpoint
    async def part_drop(self, member: str, incarnation: int, part: int) -> None:
        """The partition is gone; its memory returns as readers let go."""
        self._check_alive(member, incarnation)
        self.partitions.drop(part)

    @endpoint
    async def part_tasks(self, member: str, incarnation: int, part: int) -> list[dict[str, Any]]:
        """Every task with what it has read, for a checkpoint: {name, columns, sampler, num_passes, done: runs}."""
        self._check_alive(member, incarnation)
        return [
            {
                "name": task.name, "columns": task.columns, "sampler": task.sampler, "num_passes": task.num_passes,
                "done": task.done_runs(),
            }
            for task in self.partitions.table(part).tasks.values()
        ]  # fmt: skip


def _ids(table: Table, num: int, n: int) -> list[int]:
    return [row_id(num, i) for i in range(n) if table.live(row_id(num, i))]


def _reader(member: str, incarnation: int, task: str, reader: list[Any]) -> Reader:
    scope, rank, ranks, peer, peers = reader
    return Reader(task, f"{member}.{incarnation}{'/' if scope else ''}{scope}", member, rank, ranks, peer, peers)
