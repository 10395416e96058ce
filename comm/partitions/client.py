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

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.memory import Memories
from rondo.comm.partitions.nested import columns_of
from rondo.comm.partitions.runs import MAX_ROWS, compress, count
from rondo.comm.partitions.spec import Sampler, Sequential
from rondo.comm.partitions.stats import DROPPED, ENDED, PartitionStats, StatsReader, stats_name
from rondo.comm.partitions.stream import Reading, Stream
from rondo.comm.ring.records import Column, record_bytes
from rondo.comm.ring.ring import Record, RingView, RingWriter, place
from rondo.runtime.errors import Closed, ConfigError, CorruptData, OutOfSpace, RondoError
from rondo.runtime.memory.segments import Segment, SegmentClient
from rondo.runtime.waits import waiting

if TYPE_CHECKING:
    from rondo.comm.bus.bus import Member

ROOM = "partition room"
_STREAM_S = 3600.0
_KEPT_RECORDS = 64  # records whose views are kept: a claim may take a part of one, and the next claim the next part

Rows = Batch | Sequence[int] | Sequence[str]
Listed = list[dict[str, Any]]
Records = list[Record]
Rings = list[list[Any]]
Columns = list[Column]


class Partition:
    """Belongs to one event loop; `bus.partition(name)` makes it and `bus.close` closes it."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        member: Member,
        call: Callable[..., Awaitable[Any]],
        segments: SegmentClient,
    ) -> None:
        self.name = name
        self._settings = dict(settings)
        self._member = member
        self._call = call
        self._memories = Memories(segments)
        self._id = -1
        self._stats: StatsReader | None = None
        self._lock = asyncio.Lock()  # held while this process opens the partition or asks for room
        self._writers: dict[str, tuple[RingWriter, Segment, int]] = {}
        self._views: dict[str, tuple[RingView, Segment]] = {}
        self._records: OrderedDict[tuple[str, int, int], Record] = OrderedDict()
        self._num_dropped = 0
        self._owing: dict[Stream, None] = {}
        self._sending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop

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
        record = self._new_rows(columns, keys, groups, tags, policy_versions, tokens)
        await self.put_record(*record, deadline_s=deadline_s)

    def put_nowait(self, columns: Mapping[str, Any], keys: Sequence[str] | None = None, **said: Any) -> None:
        """`put` without a wait: OutOfSpace where this process has no room for it. One `put` must have come before."""
        names = ("groups", "tags", "policy_versions", "tokens")
        record = self._new_rows(columns, keys, *(said.pop(name, None) for name in names))
        if said:
            raise TypeError(f"put_nowait must get {', '.join(names)}, got {', '.join(said)}.")
        if self._id < 0 or self._lock.locked() or not self._try(record):
            raise OutOfSpace(f"put_nowait into partition {self.name} must find room, got none. Use `await put`.")

    async def add(self, rows: Rows, columns: Mapping[str, Any], *, deadline_s: float = 600.0) -> None:
        """Further columns of rows that are there: a batch, their ids or their keys. What a row has already stays."""
        found, json, n = columns_of(columns)
        meta: dict[str, Any] = {"json": json} if json else {}
        if isinstance(rows, Batch):
            meta["to"] = rows.rows
            num_rows = len(rows)
        elif rows and isinstance(rows[0], str):
            meta |= {"keys": list(rows), "add": True}
            num_rows = len(rows)
        else:
            meta["to"] = compress(rows)  # type: ignore[arg-type]  # not keys, so ids
            num_rows = count(meta["to"])
        if num_rows != n:
            raise ValueError(f"the columns must have one value for each of {num_rows} rows, got {n}.")
        await self.put_record(found, n, meta, deadline_s=deadline_s)

    async def end(self) -> None:
        """This producer puts no more rows. Streams end when every producer has said so and all rows are read."""
        await self.ask("part_end", self._member.rank)

    def _new_rows(
        self, columns: Mapping[str, Any], keys: Any, groups: Any, tags: Any, versions: Any, tokens: Any
    ) -> tuple[list[Column], int, dict[str, Any]]:
        found, json, n = columns_of(columns)
        if tokens is None:
            tokens = next(([len(array) for array in c.arrays if array.ndim] for c in found if c.name == "tokens"), None)
        said = {"keys": keys, "groups": groups, "tags": tags, "versions": versions, "tokens": tokens}
        meta = {name: _plain(value) for name, value in said.items() if value is not None}
        named = meta.get("keys", [])
        if not isinstance(named, list) or not all(isinstance(key, str) for key in named):
            raise ValueError(f"keys must be a list with one text a row, got {named!r:.200}.")
        for name, value in meta.items():
            if isinstance(value, list) and len(value) != n:
                raise ValueError(f"{name} must have one value for each of {n} rows, got {len(value)}.")
        if json:
            meta["json"] = json
        return found, n, meta

    async def put_record(self, columns: Columns, n: int, meta: dict[str, Any], *, deadline_s: float = 600.0) -> None:
        """One record of `n` rows as it lies in memory; `meta` is what was said of them (`fold.put_event` names the fields)."""
        if n > MAX_ROWS:
            raise ConfigError(f"a put must have at most {MAX_ROWS} rows, got {n}. Put them in parts.")
        record = (columns, n, meta)
        if self._id >= 0 and not self._lock.locked() and self._try(record):
            return
        async with waiting(ROOM, peer=f"partition {self.name}", deadline_s=deadline_s):
            await self.opened()
            async with self._lock:
                if self._try(record):
                    return
                num_bytes = record_bytes([(0, 0, 0, n)], columns, self._said(meta))
                done = False
                try:
                    while not done:
                        rings = await self.ask("part_room", self._member.rank, num_bytes, deadline_s=deadline_s)
                        self._write_to(rings)
                        done = self._try(record)
                finally:
                    if not done:  # the coordinator may have taken an empty ring away for this call: ask which there are
                        self._let_go()

    def _try(self, record: tuple[list[Column], int, dict[str, Any]]) -> bool:
        """Put into the first ring that takes it, the newest first."""
        state = self._stats.state if self._stats is not None else 0
        if state == DROPPED:
            self._forget_dropped()
            raise Closed(
                f"partition {self.name} must be there, got one that was dropped. The next use makes a new one."
            )
        if state == ENDED and "to" not in record[2] and "add" not in record[2]:
            raise Closed(
                f"partition {self.name} must be open for new rows, got one that has ended. Add columns, or drop it."
            )
        columns, n, meta = record
        spans, said, num_bytes = [(0, 0, 0, n)], self._said(meta), 0
        for name in list(reversed(self._writers)):
            writer = self._writers[name][0]
            if num_bytes and place(writer.capacity, writer.head, num_bytes) + num_bytes > writer.tail + writer.capacity:
                continue
            try:
                writer.put(spans, columns, epoch=0, attempt=self._member.attempt, meta=said)
            except OutOfSpace:
                num_bytes = record_bytes(spans, columns, said)  # for the others: a look at their words is enough
                continue
            if num_bytes:
                self._writers[name] = self._writers.pop(name)  # the first to be tried next time
            return True
        return False

    def _said(self, meta: dict[str, Any]) -> dict[str, Any]:
        return {"part": self._id, **meta}

    def _write_to(self, rings: Rings) -> None:
        """These are this process's rings now."""
        names = [name for name, _ in rings]
        for gone in [name for name in self._writers if name not in names]:
            _shut(self._writers.pop(gone))
        for name in names:
            if name not in self._writers:
                segment, doorbell = self._memories.segment(name, 0), self._memories.doorbell(name)
                self._writers[name] = (RingWriter(segment, doorbell, name), segment, doorbell)

    def _let_go(self) -> None:
        for writer in self._writers.values():
            _shut(writer)
        self._writers.clear()

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
        member = self._member
        dp_ranks = member.world_size if ranks is None else ranks
        peers = max(1, member.world_size // dp_ranks) if dp_ranks else 1
        dp_rank = member.rank % max(1, dp_ranks) if rank is None else rank
        reading = Reading(
            task, tuple(columns), sampler or Sequential(), batch, dp_rank, dp_ranks, member.rank, peers, until, partial,
            consumer, version, deadline_s,
        )  # fmt: skip
        return Stream(self, reading)

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
        said = {name[:-1] if name != "tokens" else name: answer[name] for name in _SAID if name in answer}
        said["tags"] = said.pop("tag", None)
        found, at = [], 0
        for (start, rows), columns in zip(answer["rows"], answer["columns"], strict=True):
            for id in range(start, start + rows):
                row = {name: values[at] for name, values in said.items() if values and values[at] is not None}
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
        if self._id < 0:
            await self.opened()
        await self._call("part_drop", self._id)
        self._forget_all()

    async def tasks(self) -> Listed:
        """Every task with what it has read: {name, columns, sampler, num_passes, done: runs of row ids}."""
        found: Listed = await self.ask("part_tasks")
        return found

    def stats(self) -> PartitionStats:
        """Counters from shared memory, without a call. Raises Closed before the first use of the partition."""
        if self._stats is None:
            raise Closed(
                f"partition {self.name} must be open for its counters, got one not used yet. Await `opened()`."
            )
        return self._stats.read()

    async def flush(self) -> None:
        """Send every acknowledgement that no claim has taken along."""
        for stream in list(self._owing):
            self._owing.pop(stream, None)
            try:
                await stream.flush()
            finally:
                if stream.owes:
                    self._owing[stream] = None

    # ---- for streams ------------------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Make or find the partition, and take over the rings that an earlier incarnation of this process left."""
        if self._id >= 0:
            return
        async with self._lock:
            if self._id >= 0:
                return
            answer = await self._call("part_open", self.name, self._settings or None, self._member.rank)
            self._loop = asyncio.get_running_loop()
            self._stats = StatsReader(self._memories.segment(stats_name(answer["part"]), 0))
            self._id = answer["part"]
            self._write_to(answer["rings"])

    async def ask(self, method: str, *arguments: Any, deadline_s: float = 60.0) -> Any:
        """A call about this partition. Acknowledgements still owed go first, so that every answer counts them."""
        if self._id < 0:
            await self.opened()
        if self._owing and method not in ("part_claim", "part_ack", "part_room"):
            await self.flush()
        try:
            return await self._call(method, self._id, *arguments, deadline_s=deadline_s)
        except Closed:
            self._forget_dropped()
            raise

    @property
    def life(self) -> int:
        """The number of this partition; one that is made under the same name later has another. -1 before its first use."""
        return self._id

    def owes(self, stream: Stream, *, soon: bool) -> None:
        """The stream has acknowledgements to send: with its next claim, or `soon`, as a call of their own. From any thread."""
        self._owing[stream] = None
        if soon:
            self._loop.call_soon_threadsafe(self._send_soon)

    def _send_soon(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        with suppress(RondoError):  # what could not be sent is still owed: the next call raises why
            while self._owing:
                await self.flush()

    async def records(self, answer: Mapping[str, Any]) -> Records:
        """The records of an answer, mapped. Raises CorruptData when one is not there any more."""
        if answer["dropped"] != self._num_dropped:
            left = await self._call("part_rings", self._id)
            for ring in [ring for ring in self._views if ring not in left]:
                self._forget(ring)
            self._num_dropped = answer["dropped"]
        return [self._record(ring, pos, seq) for ring, pos, seq in answer["records"]]

    def _record(self, ring: str, pos: int, seq: int) -> Record:
        record = self._records.get((ring, pos, seq))
        if record is not None and record.valid():
            self._records.move_to_end((ring, pos, seq))
            return record
        if ring not in self._views:
            segment = self._memories.segment(ring, 0)
            self._views[ring] = (RingView(segment, ring), segment)
        record = self._records[ring, pos, seq] = self._views[ring][0].read(pos, seq)
        if len(self._records) > _KEPT_RECORDS:
            self._records.popitem(last=False)
        return record

    def _forget(self, ring: str) -> None:
        for name in [name for name in self._records if name[0] == ring]:
            del self._records[name]
        view, segment = self._views.pop(ring)
        view.close()
        segment.close()

    def _forget_dropped(self) -> None:
        if self._stats is not None and self._stats.state == DROPPED:
            self._forget_all()

    def _forget_all(self) -> None:
        self._let_go()
        for ring in list(self._views):
            self._forget(ring)
        self._owing.clear()
        if self._stats is not None:
            self._stats.close()
        self._stats, self._id, self._num_dropped = None, -1, 0

    def close(self) -> None:
        """Let go of all memory; rows and records stay. Acknowledgements that were not sent are not: their rows come again."""
        if self._sending is not None:
            self._sending.cancel()
        self._forget_all()


_SAID = ("keys", "groups", "versions", "tokens", "tags")


def _plain(value: Any) -> Any:
    """Lists, numbers and texts as JSON has them; arrays and tensors become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | int | float | Mapping):
        return dict(value) if isinstance(value, Mapping) else value
    return [_plain(item) for item in value]


def _shut(writer: tuple[RingWriter, Segment, int]) -> None:
    writer[0].close()
    writer[1].close()
    os.close(writer[2])
