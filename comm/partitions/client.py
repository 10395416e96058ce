"""A partition as a role sees it: put rows, add columns, stream batches, and ask by key. One object a process and name.

Owns this process's side: its rings (it is their only writer), read-only maps of the others', and the calls. Decides nothing.

    part = bus.partition("eval")                                          # made at the first use, by whoever comes first
    await part.put({"tokens": rows, "meta": {"source": names}}, keys=names)
    async for batch in part.stream("score", columns=["tokens"], batch=64):
        await part.add(batch, {"score": scores(batch["tokens"])})         # for other tasks that wait for this column
        batch.ack()
    await part.end()

Room: a put goes into memory that this process has already, and asks the coordinator for more only where that is full. It then
waits, under the name "partition room", until rows are cleared; nothing is ever thrown out to make room.

Invariant: once `put` returns, its rows survive this process, every reader and the coordinator.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from rondo.comm.bus.member import Calls, Member
from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.entry import SAID
from rondo.comm.partitions.nested import columns_of
from rondo.comm.partitions.opened import Opened
from rondo.comm.partitions.reading import Reading
from rondo.comm.partitions.runs import MAX_ROWS, compress
from rondo.comm.partitions.spec import Sampler, Sequential
from rondo.comm.partitions.stats import DROPPED, ENDED
from rondo.comm.partitions.stream import Stream
from rondo.comm.ring.records import Column, record_bytes
from rondo.comm.ring.ring import place
from rondo.comm.ring.views import Segments
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import Closed, ConfigError, CorruptData, OutOfSpace
from rondo.runtime.waits import waiting

ROOM = "partition room"
_STREAM_S = 3600.0

Rows = Batch | Sequence[int] | Sequence[str]
Listed = list[dict[str, Any]]
Columns = list[Column]


class Partition(Opened):
    """`bus.partition(name)` makes it and `bus.close` closes it (`Partitions`)."""

    # ---- producing --------------------------------------------------------------------------------------------------

    async def put(
        self,
        columns: Mapping[str, Any],
        keys: Sequence[str] | None = None,
        *,
        groups: Sequence[int | str] | int | str | None = None,
        tags: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
        policy_versions: Sequence[int] | int | None = None,
        tokens: Sequence[int] | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        """New rows, one record. What `columns` may hold is in `nested.py`: tensors, jagged lists, JSON, nested dicts.

        With `keys`, a key that is there already gets those columns that it has not. `groups`, `tags` and `policy_versions`
        (the oldest version in a row) are one for all rows or one a row; `tokens` is what a row costs a sampler, by default the
        length of column "tokens". Waits for room up to `deadline_s`. Raises Closed when the partition ended or was dropped.
        """
        found, json, n = columns_of(columns)
        if tokens is None:
            tokens = next(([len(array) for array in c.arrays if array.ndim] for c in found if c.name == "tokens"), None)
        given = zip(SAID, (keys, groups, policy_versions, tokens, tags), strict=True)
        meta = {name: _plain(value) for name, value in given if value is not None}
        named = meta.get("keys", [])
        if not isinstance(named, list) or not all(isinstance(key, str) for key in named):
            raise ValueError(f"keys must be a list with one text a row, got {named!r:.200}.")
        for name, value in meta.items():
            if isinstance(value, list) and len(value) != n:
                raise ValueError(f"{name} must have one value for each of {n} rows, got {len(value)}.")
        await self.put_record(found, n, meta | ({"json": json} if json else {}), deadline_s=deadline_s)

    async def add(self, rows: Rows, columns: Mapping[str, Any], *, deadline_s: float = 600.0) -> None:
        """Further columns of rows that are there: a batch, their ids or their keys. What a row has already stays."""
        found, json, n = columns_of(columns)
        meta: dict[str, Any] = {"json": json} if json else {}
        if not isinstance(rows, Batch) and rows and isinstance(rows[0], str):
            meta |= {"keys": list(rows), "add": True}
        else:
            meta["to"] = rows.rows if isinstance(rows, Batch) else compress(rows)  # type: ignore[arg-type]  # so ids
        if len(rows) != n:
            raise ValueError(f"the columns must have one value for each of {len(rows)} rows, got {n}.")
        await self.put_record(found, n, meta, deadline_s=deadline_s)

    async def end(self) -> None:
        """This producer puts no more rows. Streams end when every producer has said so and all rows are read."""
        await self.ask("part_end", self.member.rank)

    async def put_record(self, columns: Columns, n: int, meta: dict[str, Any], *, deadline_s: float = 600.0) -> None:
        """One record of `n` rows as it lies in memory; `meta` is what was said of them (`fold.put_event` names the fields)."""
        if n > MAX_ROWS:
            raise ConfigError(f"a put must have at most {MAX_ROWS} rows, got {n}. Put them in parts.")
        record = (columns, n, meta)
        if self.life >= 0 and not self._lock.locked() and self._try(*record):
            return
        async with waiting(ROOM, peer=f"partition {self.name}", deadline_s=deadline_s):
            await self.opened()
            async with self._lock:
                if self._try(*record):
                    return
                num_bytes = record_bytes([(0, 0, 0, n)], columns, {"part": self.life, **meta})
                done = False
                try:
                    while not done:
                        rings = await self.ask("part_room", self.member.rank, num_bytes, deadline_s=deadline_s)
                        self._write_to(rings)
                        done = self._try(*record)
                finally:
                    if not done:  # the coordinator may have taken an empty ring away for this call: ask which there are
                        self._writers.close()

    def _try(self, columns: Columns, n: int, meta: dict[str, Any]) -> bool:
        """Put into the first ring that takes it, the newest first."""
        if self._state == DROPPED:
            self._forget()
            raise Closed(
                f"partition {self.name} must be there, got one that was dropped. The next use makes a new one."
            )
        if self._state == ENDED and "to" not in meta and "add" not in meta:
            raise Closed(
                f"partition {self.name} must be open for new rows, got one that has ended. Add columns, or drop it."
            )
        spans, said, num_bytes = [(0, 0, 0, n)], {"part": self.life, **meta}, 0
        for name in reversed(list(self._writers)):
            writer = self._writers[name]
            if num_bytes and place(writer.capacity, writer.head, num_bytes) + num_bytes > writer.tail + writer.capacity:
                continue
            try:
                writer.put(spans, columns, epoch=0, attempt=self.member.attempt, meta=said)
            except OutOfSpace:
                num_bytes = record_bytes(spans, columns, said)  # for the others: a look at their words is enough
                continue
            if num_bytes:
                self._writers.prefer(name)
            return True
        return False

    # ---- reading ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        task: str,
        *,
        columns: Sequence[str],
        sampler: Sampler | None = None,
        batch: int = 64,
        rank: int | None = None,
        ranks: int | None = None,
        until: str = "end",
        partial: bool = False,
        consumer: str = "",
        version: Callable[[], int] | None = None,
        deadline_s: float = _STREAM_S,
    ) -> Stream:
        """Batches of a task, until the partition has ended and all is read, or only what is ready `until="now"`.

        Whoever opens a task first fixes its `columns` (a row is ready when it has them) and its `sampler`. `rank` of `ranks` is
        the data-parallel rank (by default every process is one); processes that share it get the same rows for the same batch,
        and a row is done when all of them acknowledged. Batch k exists for every rank or for none; it may be empty on some.
        `batch` is the most rows a rank gets: a batch waits until it is full, unless `partial`. Role groups of the same task
        compete for rows; `consumer` tells streams of one process apart. `deadline_s` bounds the wait for one batch.
        """
        member = self.member
        dp_ranks = member.world_size if ranks is None else ranks
        peers = max(1, member.world_size // dp_ranks) if dp_ranks else 1
        dp_rank = member.rank % max(1, dp_ranks) if rank is None else rank
        reading = Reading(task, consumer, list(columns), batch, dp_rank, dp_ranks, member.rank, peers, until, partial)
        return Stream(self, reading, sampler or Sequential(), version, deadline_s)

    async def get(
        self,
        rows: Sequence[str] | Sequence[int],
        columns: Sequence[str] | None = None,
        *,
        copy: bool = True,
        wait: bool = False,
        deadline_s: float = 60.0,
    ) -> Batch:
        """These rows by key or id, in this order; all columns that they share, or those named.

        Raises KeyError when one is not there; with `wait`, waits until all are. `copy=False` gives views, which are good while
        `batch.valid()`: until somebody clears the rows.
        """
        before: Any = None
        async with waiting("partition get", peer=f"partition {self.name}", deadline_s=deadline_s):
            while True:
                wanted = None if columns is None else list(columns)
                answer = await self.ask("part_get", list(rows), wanted, wait, deadline_s=deadline_s)
                try:
                    batch = Batch(answer, await self.records(answer))
                    return batch.copied() if copy else batch
                except CorruptData:
                    if answer == before:
                        raise  # nobody cleared them: the bytes are wrong
                    before = answer  # cleared since the answer: the next one says so

    async def list(
        self, *, tags: Mapping[str, Any] | None = None, since: int = 0, limit: int = 10_000
    ) -> tuple[Listed, int]:
        """Rows that have all `tags` and changed after `since`, and the cursor to go on from; at most about `limit` of them.

        A row is {id, key, group, version, tokens, tags, columns}, what nobody said is left out. Call again with the cursor
        until nothing comes.
        """
        answer = await self.ask("part_list", dict(tags or {}), since, limit)
        said = {shown: answer[name] for name, shown in zip(SAID, _SHOWN, strict=True) if name in answer}
        found, at = [], 0
        for (start, rows), columns in zip(answer["rows"], answer["columns"], strict=True):
            for id in range(start, start + rows):
                row = {name: values[at] for name, values in said.items() if values[at] is not None}
                found.append({"id": id, "columns": columns, **row})
                at += 1
        return found, answer["cursor"]

    async def pages(self, limit: int = 10_000) -> AsyncIterator[Listed]:
        """Every row there is, page by page, oldest change first."""
        cursor = 0
        while True:
            rows, cursor = await self.list(since=cursor, limit=limit)
            if not rows:
                return
            yield rows

    async def tag(self, rows: Sequence[str] | Sequence[int], tags: Mapping[str, Any]) -> None:
        """Merge `tags` into those of the rows; None takes one away. Values are text, numbers or booleans."""
        await self.ask("part_tag", list(rows), dict(tags))

    async def clear(self, rows: Sequence[str] | Sequence[int] | None = None) -> int:
        """Rows are gone for everyone (None: all); memory returns when no claim holds them. How many there were."""
        return int(await self.ask("part_clear", None if rows is None else list(rows)))

    async def reset(self, task: str, to_pass: int = 1) -> int:
        """Begin pass `to_pass` of a task unless it has begun: what was read is ready again. The pass it is in."""
        return int(await self.ask("part_reset", task, to_pass))

    async def drop(self) -> None:
        """The partition is gone for everybody, in one step. The next use of this object makes a new one."""
        try:
            await self.ask("part_drop")
        except Closed:  # somebody has dropped it, perhaps this call before its answer was lost
            if self.life >= 0:
                raise
        self._forget()

    async def tasks(self) -> Listed:
        """Every task with what it has read: {name, columns, sampler, num_passes, done: runs of row ids}."""
        found: Listed = await self.ask("part_tasks")
        return found


class Partitions:
    """The partitions of a bus as one member sees them; `joining.py` makes it."""

    def __init__(self, member: Member, coordinator: ActorRef, segments: Segments) -> None:
        self.member = member
        self.call = Calls(member, coordinator)
        self._segments = segments
        self._partitions: dict[str, Partition] = {}

    def partition(self, name: str, **settings: Any) -> Partition:
        """The named set of rows `name`. Its first use makes it, with these `spec.Spec`."""
        if name not in self._partitions:
            self._partitions[name] = Partition(name, settings, self.call, self._segments)
        return self._partitions[name]

    async def flush(self) -> None:
        """Send every acknowledgement that no claim has taken along."""
        for partition in self._partitions.values():
            await partition.flush()

    def close(self) -> None:
        """Let go of every ring; memory and records stay."""
        for partition in self._partitions.values():
            partition.close()


_SHOWN = ("key", "group", "version", "tokens", "tags")  # of a row that is listed


def _plain(value: Any) -> Any:
    """Lists, numbers and texts as JSON has them; arrays and tensors become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | int | float | Mapping):
        return dict(value) if isinstance(value, Mapping) else value
    return [_plain(item) for item in value]
