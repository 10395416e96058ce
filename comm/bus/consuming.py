"""Rounds for those who read rows: planned when somebody asks, with room for the columns that they put.

Owns when a plan is made and for whom; not what is in it (`rounds.py`, `balance.py`).

Invariant: a round of a forward stream is planned only with room promised for every column that comes of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rondo.comm.bus import wakes
from rondo.comm.bus.group import LENGTH, RESPONSE
from rondo.comm.bus.index import Index
from rondo.comm.bus.rounds import Round, Stream, train_scope
from rondo.comm.bus.transitions import Transitions, at_once
from rondo.comm.ring.records import worst_case_bytes
from rondo.comm.ring.spans import Span, num_rows
from rondo.runtime.actors.actor import endpoint


class Consuming(Transitions):
    """Endpoints of role groups that read rows."""

    @at_once
    def join(self, member: str, incarnation: int, stream: str, num_ranks: int, tokens: int) -> None:
        """A role group registers its layout for a stream: data-parallel ranks, and tokens a micro-batch."""
        if self.index.rounds.lanes[stream].layouts.get(member) != [num_ranks, tokens]:
            self._emit({"event": "join", "stream": stream, "member": member, "ranks": num_ranks, "tokens": tokens})

    @endpoint
    async def next_rounds(
        self,
        member: str,
        incarnation: int,
        stream: str,
        rank: int,
        index: int,
        step: int | None = None,
        early: bool = False,
    ) -> dict[str, Any]:
        """Round `index` for one rank, and those behind it that are there: {"rounds": [{...}, ...]} or {"end": True}. Train
        streams name the step; waits.

        early: of a rank that still works on another round: waits until nothing could be added to this one any more, so that
        asking early cuts a step no finer. Once any rank waits for it, it is made of what is ready.
        """
        # What rounds wait for: rows of the stream, and where it puts columns, room for them.
        topics = (wakes.rounds(stream, step), *((wakes.lease(member),) if step is None else ()))
        scope = f"{member}.{incarnation}" if step is None else train_scope(step)
        rounds, plan = self.index.rounds, (stream, scope, early)
        spec = rounds.lanes[stream].spec

        def made() -> dict[str, Any] | None:
            found = rounds.find(stream, scope, index)
            if not found:
                rests = step is not None and not self.index.trains(stream, step)
                stops = self._draining and not self._completes(stream, step)
                if rests or self.index.done or stops or self._leaves(member, incarnation, step):
                    if stops and not rests and step is not None and not self.index.is_left(step):
                        # What another role alone trains of it is not committed any more: journalled before the answer goes.
                        self._fold({"event": "left", "step": step})
                        asyncio.get_running_loop().call_soon(self._wakes.wake_all)  # behind this answer
                    return {"end": True}  # the same for every rank: one plan is for all of them
                if self._wakes.is_vain(plan, *topics):
                    return None
                planned = self.index.plan_rounds(stream, member, incarnation, step, full=early)
                if not planned or (step is None and not self._reserve_outputs(planned, spec, member)):
                    self._wakes.in_vain(plan, *topics)
                    return None
                self._fold({"event": "rounds", "rounds": planned})
                self._wakes.wake(topics[:1])  # the other ranks
                found = rounds.find(stream, scope, index)
            return {"rounds": [round_of(self.index, each, rank) for each in found]} if found else None

        return await self._until(member, incarnation, made, *topics)

    def _leaves(self, member: str, incarnation: int, step: int | None) -> bool:
        """Whether this member, which drains, gets no more rounds: a trainer behind a whole step. Once it was told, it leaves: its
        other ranks are told the same."""
        if not self._drains(member, incarnation):
            return False
        whole = step is None or self.config.generates(member) or self.index.rounds.may_leave(member, step)
        if whole:
            self._leaving.add((member, incarnation))
        return whole

    def _completes(self, stream: str, step: int | None) -> bool:
        """Whether a run that is being stopped goes on with a step: another role has trained it, and all that this one needs for
        it is there."""
        others = (report for role, report in self.index.prepared.items() if role != stream)
        if step is None or self.index.is_left(step) or not any(report["version"] == step + 1 for report in others):
            return False
        return self.index.has_all(stream, step)

    def _reserve_outputs(self, planned: list[Round], spec: Stream, member: str) -> bool:
        """Name the ring, per rank, that has room for every column these rounds will put; False when one has not."""
        if not planned or not spec.outputs:
            return True
        oldest = min(event["step"] for event in planned) <= self.index.step
        wanted = [
            [self._output_bytes(event["spans"][rank], spec) for event in planned]
            for rank in range(len(planned[0]["spans"]))
        ]
        places = [
            self._place(f"ring/{member}/{rank}", [size for size in sizes if size], oldest=oldest)
            for rank, sizes in enumerate(wanted)
        ]
        if None in places:
            return False
        for rank, sizes in enumerate(wanted):
            ring = self._room(f"ring/{member}/{rank}", member, [size for size in sizes if size], oldest=oldest)
            for event, size in zip(planned, sizes, strict=True):
                event["reserve"][rank] = [ring, [size] if size else []]
        return True

    def _output_bytes(self, spans: list[Span], spec: Stream) -> int:
        if not spans:
            return 0
        groups = self.index.groups

        def longest(kind: int) -> int:
            return max([max(groups[g].info[kind][groups[g].at(part, first, n)]) for g, part, first, n in spans])

        of_responses, of_samples = longest(RESPONSE), longest(LENGTH) if spec.sample_bytes else 0
        columns = [
            (name, spec.sample_bytes[name], of_samples)
            if name in spec.sample_bytes
            else (name, spec.output_bytes_per_token, of_responses)
            for name in spec.outputs
        ]
        return worst_case_bytes(num_rows(spans), columns)

    @at_once
    def ack(self, member: str, incarnation: int, key: str, rank: int) -> None:
        """This rank read its rows of a round and put its columns; it holds no view of them any more."""
        if self.index.rounds.knows(key):
            self._emit({"event": "ack", "key": key, "rank": rank})


def round_of(index: Index, made: Round, rank: int) -> dict[str, Any]:
    """This rank's part of a round, as `bus.py` reads it:

    {"key", "index", "step", "last", "turn", "update", "closes", "ring", "spans": [[7, 0, 0, 2], ...],
     "groups": [{"group": 7, "step": 1, "samples": 8, "media": {column: place},
                 "extents": [[columns, part, first sample, count, place], ...]}, ...]}

    Places are named by the record, not by the row, and the media of a group once, only to streams that read them. The records
    that rollout put are always among them, since they say of each row what it is (`group.INFO`).
    """
    spec, base = index.rounds.lanes[made["stream"]].spec, index.rules.base_columns
    spans, reserve, wanted = made["spans"][rank], made["reserve"][rank], spec.inputs
    groups = []
    for id in dict.fromkeys([span[0] for span in spans]):
        group = index.groups[id]
        extents = [
            [[name for name in columns if name in wanted], *rows]
            for columns, *rows in group.extents
            if [name for name in columns if name in wanted or name in base]
        ]
        media = group.media if spec.media else {}
        groups.append(
            {"group": id, "step": group.step, "samples": group.num_samples, "extents": extents, "media": media}
        )
    return {
        "key": made["key"], "index": made["index"], "step": made["step"], "last": made["last"], "turn": made["turn"],
        "update": made["update"], "closes": made["closes"], "spans": spans, "groups": groups,
        "ring": reserve[0] if reserve else None,
    }  # fmt: skip
