"""The bus as a role sees it: put rows, stream rounds, hold weights. One `Bus` per worker process.

Owns this process's side of the rings (one writer, cached read-only maps) and the calls to the coordinator. Decides nothing:
which rows exist and who may read them is the coordinator's word alone.

    async for round in bus.stream("reference", tokens=4096):       # waits have names and deadlines
        log_probs = score([row.array("tokens") for row in round.rows])
        bus.put_columns(round, {"ref_log_probs": log_probs})       # one copy in; never waits (room was reserved)
        await bus.ack(round)                                       # checks generations, then gives the memory back
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rondo.comm.bus.ahead import Ahead
from rondo.comm.bus.group import FINISH, FINISHES, INFO, LENGTH, RESPONSE, REWARD
from rondo.comm.bus.member import Calls, Member
from rondo.comm.ring.records import GROUP_BLOB, Column
from rondo.comm.ring.ring import Record, RecordRef
from rondo.comm.ring.spans import Span, num_rows, spans_in
from rondo.comm.ring.views import Views, Writers
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import CorruptData
from rondo.runtime.memory.segments import SegmentClient

POLL_S = 3600.0
"""Longest time that one call waits at the coordinator: one that lives says sooner that there is nothing yet (`NotYet`), and is
asked again, without end."""

MADE_S = 3900.0
"""Longer than making the largest segment may take."""

_KEPT = 128
"""A ring that so many answers have not named, or twice as many, is let go: its producer may have left, and its memory goes with
its last mapping."""

Prepare = Callable[["Round"], Awaitable[None]]
_OVERFLOW = "overflow/"
_SAID = (LENGTH, RESPONSE, REWARD, FINISH)
"""What a row has of `INFO`."""


class Row:
    """One row of a round: a part of a sample, most often its only one. `array` gives a read-only view into the ring, valid until
    the round is acknowledged. So are the arrays of `media`: one mapping for all samples of a prompt group; None for text, and in
    streams that read no media."""

    __slots__ = ("_held", "_number")

    def __init__(self, held: _Held, number: int) -> None:
        self._number = number  # among the rows of its group (`group.py`)
        self._held = held

    @property
    def length(self) -> int:
        """Tokens, prompt and response, and what encoders take of media of its own."""
        return self._held.info[self._number][0]

    @property
    def response(self) -> int:
        """Tokens of the response."""
        return self._held.info[self._number][1]

    @property
    def reward(self) -> float | None:
        """None: it failed."""
        return self._held.info[self._number][2]

    @property
    def finish(self) -> str:
        return FINISHES[self._held.info[self._number][3]]

    @property
    def group(self) -> int:
        return self._held.group

    @property
    def sample(self) -> int:
        return self._number % self._held.num_samples

    @property
    def part(self) -> int:
        return self._number // self._held.num_samples

    @property
    def step(self) -> int:
        return self._held.step

    @property
    def media(self) -> Mapping[str, np.ndarray] | None:
        return self._held.media

    @property
    def media_key(self) -> str:
        """Equal for samples that share media, and for no others."""
        return f"group {self.group}"

    @property
    def columns(self) -> Collection[str]:
        """The columns that the stream reads."""
        return self._held.columns

    def array(self, column: str) -> np.ndarray:
        return self._held[column][self._number]


class _Held(dict[str, Mapping[int, np.ndarray] | Sequence[np.ndarray]]):
    """What a round has of one prompt group: column -> number of the row -> its array. A column is made when it is first asked
    for."""

    __slots__ = ("_extents", "_info", "_records", "group", "media", "num_samples", "step")

    def __init__(self, fields: Mapping[str, Any], records: Mapping[tuple[str, int, int], Record]) -> None:
        self.group: int = fields["group"]
        self.step: int = fields["step"]
        self.num_samples: int = fields["samples"]
        self._extents, self._records = fields["extents"], records
        self._info: dict[int, tuple[Any, ...]] = {}
        self.media = {
            name: records[ring, pos, seq].column(name, i) for name, (ring, pos, seq, i) in fields["media"].items()
        } or None

    @property
    def columns(self) -> set[str]:
        return {name for names, *_ in self._extents for name in names}

    @property
    def info(self) -> dict[int, tuple[Any, ...]]:
        """`_SAID` of each row, by its number."""
        if not self._info:
            for _, of, at, num, (ring, pos, seq, i) in self._extents:
                told = self._records[ring, pos, seq].descriptor.info()
                if told:  # by rollout, of rows that it put
                    info = list(zip(*[told[field] for field in _SAID], strict=True))
                    start = of * self.num_samples + at
                    self._info.update(zip(range(start, start + num), info[i : i + num], strict=True))
        return self._info

    def rows(self, part: int, first: int, count: int) -> list[Row]:
        """Those of a span."""
        start = part * self.num_samples + first
        return [Row(self, number) for number in range(start, start + count)]

    def packed(self, column: str, num_rows: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The column of all rows as it lies in the only record that has it; None where there are several, or others in it."""
        found = [extent for extent in self._extents if column in extent[0]]
        if len(found) != 1 or found[0][3] != num_rows:
            return None
        (ring, pos, seq, _) = found[0][4]
        record = self._records[ring, pos, seq]
        return record.packed(column) if record.num_rows == num_rows else None

    def __missing__(self, column: str) -> Mapping[int, np.ndarray] | Sequence[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for names, part, first, count, (ring, pos, seq, i) in self._extents:
            if column in names:
                arrays = self._records[ring, pos, seq].arrays(column)
                if first == i == 0 and len(self._extents) == 1:
                    return self.setdefault(column, arrays)  # put whole: they stand in the order of their samples
                start = part * self.num_samples + first
                found.update(zip(range(start, start + count), arrays[i : i + count], strict=True))
        return self.setdefault(column, found)


class Rows(Sequence[Row]):
    """The rows of a round in their order, made when one is first asked for."""

    __slots__ = ("_held", "_rows", "_spans", "num")

    def __init__(self, held: Mapping[int, _Held], spans: list[Span]) -> None:
        self._held, self._spans, self.num = held, spans, num_rows(spans)
        self._rows: list[Row] | None = None

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, at: Any) -> Any:
        return self._all()[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._all())

    def _all(self) -> list[Row]:
        if self._rows is None:
            self._rows = [row for group, *span in self._spans for row in self._held[group].rows(*span)]
        return self._rows

    def packed(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of all rows end to end in their order, flattened, and how many elements each has: a view where they lie so in
        one record, else a copy."""
        if len(self._held) == len(self._spans) == 1:
            (held,) = self._held.values()
            found = held.packed(column, self.num)
            if found is not None:
                return found
        arrays = [row.array(column) for row in self]
        return np.concatenate(arrays, axis=None), np.array([array.size for array in arrays])


@dataclass(slots=True)
class Round:
    """This rank's part of one micro-batch. No rows means: run a dummy, so that all ranks run the same collectives.
    `spans` name the rows in their order. `turn` orders the rounds of all train streams of a step. `last` ends the step; `closes`
    ends `update`, one optimizer step of it."""

    key: str
    index: int
    step: int
    last: bool
    turn: int
    update: int
    closes: bool
    rows: Rows
    spans: list[Span]
    ring: str | None
    records: Mapping[tuple[str, int, int], Record]


class Bus:
    def __init__(self, member: Member, coordinator: ActorRef, segments: SegmentClient) -> None:
        self.member = member
        self.call = Calls(member, coordinator)
        self._segments = segments
        self._writers, self._views = Writers(segments), Views(segments)
        # stream -> the rings that the rounds of its newest two answers view: those worked on, and those asked for ahead
        self._named: dict[str, deque[set[str]]] = {}
        self._num_answers = 0
        # rings that the last answers named, and as many before them
        self._lately, self._before = set[str](), set[str]()
        self._joined: dict[str, int] = {}  # stream -> tokens a micro-batch
        self._ahead: dict[str, Ahead[Any]] = {}  # train stream -> its next round
        # train stream -> rounds (step, index) that came with another
        self._here: dict[str, dict[tuple[int, int], Round]] = {}

    async def open(self) -> None:
        """Open this rank's ring; the first call of a run makes it, a later incarnation takes it over at its head. Making tens of
        gigabytes takes minutes, in which whoever makes it keeps the deadline."""
        self._own_name = (await self.call("open_ring", self.member.rank, deadline_s=MADE_S))["ring"]
        self._own = self._writers[self._own_name]

    def close(self) -> None:
        """Let go of every ring; memory and records stay."""
        for ahead in self._ahead.values():
            ahead.drop()
        self._views.close()
        self._writers.close()

    @property
    def held_up_at(self) -> float:
        """When the coordinator last said that it must wait itself, on the clock of waits: what waits for it may go on waiting."""
        return self.call.held_up_at

    # ---- producing --------------------------------------------------------------------------------------------------

    def put_samples(
        self,
        ring: str,
        group: int,
        epoch: int,
        samples: Sequence[int],
        columns: Sequence[Column],
        info: Sequence[Sequence[float | None]],
        parts: Sequence[int] | None = None,
    ) -> RecordRef:
        """Samples of a leased group, whole, which become visible together. info: `INFO` of each row; versions are NO_VERSION
        where no policy sampled a token.

        parts: how many rows each sample has; None: one each. The rows stand part by part: part 0 of every sample, then part 1 of
        those that have one, and so on.
        """
        spans = spans_in(group, samples)
        for part in range(1, max(parts or (1,))):
            more = [sample for sample, num_parts in zip(samples, parts or (), strict=True) if num_parts > part]
            spans += spans_in(group, more, part)
        if len(info) != num_rows(spans) or set(map(len, info)) != {len(INFO)}:
            raise ValueError(f"info must have {', '.join(INFO)} of {num_rows(spans)} rows, got {list(info)!r:.200}.")
        return self._put(ring, spans, columns, epoch, f"group.{group}.{epoch}", list(zip(*info, strict=True)))

    def put_media(
        self, ring: str, group: int, epoch: int, columns: Sequence[Column], encoder_positions: int
    ) -> RecordRef:
        """The media of a leased group, once for all its samples and before them; each column has one array. Not where the
        lease says `has_media`: those of an earlier holder stay, and there is no room for others. `encoder_positions`: what
        the towers work on, which rounds are balanced by."""
        spans = [(group, 0, GROUP_BLOB, 1)]
        return self._put(ring, spans, columns, epoch, f"group.{group}.{epoch}", [[encoder_positions]])

    def put_columns(self, made: Round, columns: Mapping[str, Sequence[np.ndarray]]) -> RecordRef | None:
        """Derived columns for the rows of a round, one array a row, in the round's order."""
        if not made.rows or made.ring is None:
            return None
        fields = [Column(name, arrays[0].dtype.name, list(arrays)) for name, arrays in columns.items()]
        return self._put(made.ring, made.spans, fields, 0, f"{made.key}.{self.member.rank}")

    def _put(
        self,
        ring: str,
        spans: Sequence[Sequence[int]],
        columns: Sequence[Column],
        epoch: int,
        reservation: str,
        info: Sequence[Sequence[float | None]] = (),
    ) -> RecordRef:
        attempt, said = self.member.attempt, {"reservation": reservation}
        if ring == self._own_name:
            return self._own.put(spans, columns, epoch=epoch, attempt=attempt, meta=said, info=info)
        with Writers(
            self._segments
        ) as writers:  # an overflow ring serves one grant, and is taken away when it is empty
            return writers[ring].put(spans, columns, epoch=epoch, attempt=attempt, meta=said, info=info)

    # ---- consuming --------------------------------------------------------------------------------------------------

    async def join(self, stream: str, tokens: int) -> None:
        """Register this group's layout for a stream. Once is enough: the coordinator's journal keeps it."""
        if self._joined.get(stream) != tokens:
            await self.call("join", stream, self.member.world_size, tokens)
            self._joined[stream] = tokens

    async def stream(
        self,
        stream: str,
        *,
        tokens: int,
        step: int | None = None,
        then: int | None = None,
        prepare: Prepare | None = None,
    ) -> AsyncGenerator[Round, None]:
        """Rounds of a stream in order, until the run ends; of one step, until its last, when `step` is given.

        The next round of a step is asked for when the last one that is here is handed out. `then`: the step whose first round is
        asked for with the last of this one. `prepare` is awaited with every round that came before it was needed.
        """
        await self.join(stream, tokens)
        if step is not None:
            async for made in self._rounds_of_step(stream, step, then, prepare):
                yield made
            return
        index = 0
        while rounds := await self._ask(stream, index, None):
            for made in rounds:
                yield made
            index += len(rounds)

    async def _rounds_of_step(
        self, stream: str, step: int, then: int | None, prepare: Prepare | None
    ) -> AsyncGenerator[Round, None]:
        here = self._here.setdefault(stream, {})
        ahead = self._ahead.setdefault(stream, Ahead(partial(self._round_of_step, stream)))
        index, whole = 0, False
        try:
            while not whole and (made := await ahead.take(step, index)) is not None:
                index, whole = index + 1, made.last
                if not whole and (prepare is not None or (step, index) not in here):
                    ahead.ask(step, index, prepare)
                elif whole and then is not None:
                    ahead.ask(then, 0, prepare)
                yield made
        finally:
            if not whole:
                ahead.drop()
                here.clear()

    async def _round_of_step(self, stream: str, step: int, index: int, early: bool) -> Round | None:
        """One that came with another, or is asked for; None where no more come."""
        here = self._here[stream]
        if (step, index) not in here:
            rounds = await self._ask(stream, index, step, early)
            here.update(((step, made.index), made) for made in rounds)
        return here.pop((step, index), None)

    async def _ask(self, stream: str, index: int, step: int | None, early: bool = False) -> list[Round]:
        """Round `index` and those behind it that are there, or none where no more come. early: once it is full, since nobody
        waits for it yet."""
        answer = await self.call("next_rounds", stream, self.member.rank, index, step, early, deadline_s=POLL_S)
        return self._rounds(stream, answer.get("rounds", ()))

    def _rounds(self, stream: str, answer: Sequence[dict[str, Any]]) -> list[Round]:
        rounds = [self._round(fields) for fields in answer]
        rings = {ring for made in rounds for ring, _, _ in made.records}
        self._named.setdefault(stream, deque(maxlen=2)).append(rings)
        self._lately |= rings
        self._num_answers += 1
        turned = self._num_answers % _KEPT == 0
        if turned:
            self._lately, self._before = set(), self._lately
        if turned or [name for name in self._views if name.startswith(_OVERFLOW)]:
            viewed = set().union(*(rings for newest in self._named.values() for rings in newest))
            kept = viewed | {name for name in self._lately | self._before if not name.startswith(_OVERFLOW)}
            self._views.keep(kept.__contains__)
        return rounds

    def _round(self, fields: dict[str, Any]) -> Round:
        records: dict[tuple[str, int, int], Record] = {}
        held: dict[int, _Held] = {}
        for group in fields.pop("groups"):
            for ring, pos, seq, _ in [extent[4] for extent in group["extents"]] + [*group["media"].values()]:
                if (ring, pos, seq) not in records:
                    records[ring, pos, seq] = self._views[ring].read(pos, seq)
            held[group["group"]] = _Held(group, records)
        return Round(**{**fields, "rows": Rows(held, fields["spans"]), "records": records})

    def views(self) -> Views:
        """Views of the rings for whoever reads on another thread: those of the rounds come and go with the rounds."""
        return Views(self._segments)

    def check(self, made: Round) -> None:
        """Raise CorruptData when memory of this round was overwritten while it was read: the work is discarded."""
        for (ring, pos, seq), record in made.records.items():
            if not record.valid():
                raise CorruptData(
                    f"record {seq} at {pos} of {ring} must stay until it is acknowledged, got another one there. "
                    "This is a fault in rondo: the round is discarded and its role group restarts."
                )

    async def ack(self, made: Round) -> None:
        self.check(made)
        await self.call("ack", made.key, self.member.rank)
