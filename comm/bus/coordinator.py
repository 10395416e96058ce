"""The coordinator: the one process that decides what happens to prompt groups.

Owns the journal (its only writer), the rings (`rings.py`: their only releaser) and everything that waits for work. It is the
shell around `index.py`: it reads doorbells and calls, turns them into events, applies them, appends them to the journal, and
only then lets their effects leave the process (answers, tails). It computes nothing on tensors and imports no torch.

    doorbell or call -> events -> index.apply -> journal.append -> tails move, answer
                                      `-> waiters wake: what a put gives them is journalled together with it

Everything that changes state is idempotent by its own key (group and epoch, round key and rank, version, label), so a caller
that lost the connection asks again and gets the same answer. After a restart the journal is replayed, each ring is read on
from its journalled head, and deaths that happened meanwhile are fetched from the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import orjson

from rondo.comm.bus import wakes
from rondo.comm.bus.answers import lease_of, round_of
from rondo.comm.bus.audit import Ledger
from rondo.comm.bus.commits import check_commit
from rondo.comm.bus.evaluations import Evaluations
from rondo.comm.bus.group import RESPONSE
from rondo.comm.bus.index import Index, Rules
from rondo.comm.bus.journal import Event, Journal
from rondo.comm.bus.pending import Pending
from rondo.comm.bus.rings import Rings, put_event
from rondo.comm.bus.rounds import Stream, train_scope
from rondo.comm.bus.versions import engine_reader
from rondo.comm.bus.wakes import Wakes
from rondo.comm.groups.meeting import Meeting
from rondo.comm.ring.records import worst_case_bytes
from rondo.comm.ring.spans import Span, num_rows
from rondo.runtime.actors.actor import Actor, answering, endpoint
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import Refused, Stopping
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.records.telling import telling

P = ParamSpec("P")
T = TypeVar("T")

ROLLOUT_READER = engine_reader(0)
"""Who proves the weights that the leases of a replica depend on that generates on one rank."""
EVALUATION_READER = "evaluation.0"
"""Who holds the weights that a replica evaluates beside the training."""
_SPARE_BYTES = 1 << 16
"""Of an overflow ring beyond its records: it is empty and used once, so nothing wraps."""
HOLD_S = 600.0
"""A call that waits is told after this time, or twice as long, that there is nothing yet (`NotYet`), and asks again."""
MANY_FAILURES = 8
"""So many failed prompt groups in a row are told of, long before they end the run."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What `launch` decides and the coordinator holds to. Written as JSON into the run directory."""

    rules: Rules
    publisher: str  # the group that publishes weights
    rollout_ring_bytes: int
    column_ring_bytes: int
    rollout_groups: tuple[str, ...]
    ranks: dict[str, int]  # group name -> processes
    lease_deadline_s: float
    straggler_deadline_s: float | None = None
    evaluate_start: bool = True
    evaluate_end: bool = True
    evaluate_every: int | None = None  # steps; these evaluations run beside the training
    num_pinned: int = 0  # versions that the slab keeps for them

    @classmethod
    def load(cls, path: Path) -> CoordinatorConfig:
        fields = orjson.loads(path.read_bytes())
        rules = fields["rules"]
        rules["streams"] = tuple(
            Stream(**{**s, "inputs": tuple(s["inputs"]), "outputs": tuple(s["outputs"])}) for s in rules["streams"]
        )
        rules["base_columns"] = tuple(rules["base_columns"])
        fields["rollout_groups"] = tuple(fields["rollout_groups"])
        return cls(**{**fields, "rules": Rules(**rules)})


def at_once(method: Callable[Concatenate[Coordinator, str, int, P], T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """An endpoint of a member (its name and incarnation come first) that waits for nothing: who is not the living incarnation is
    refused, what it put before is seen first, and the answer goes when all that it says is in the journal."""

    @functools.wraps(method)
    async def answer(self: Coordinator, member: str, incarnation: int, *args: P.args, **kwargs: P.kwargs) -> T:
        self._fence(member, incarnation)
        found = method(self, member, incarnation, *args, **kwargs)
        self._pending.check()
        return found

    return endpoint(answer)


class Coordinator(Actor):
    """Endpoints of the bus. `start()` opens what the journal says exists; `tick()` looks at deadlines."""

    def __init__(
        self,
        config: CoordinatorConfig,
        journal: Journal,
        index: Index,
        ledger: Ledger,
        segments: SegmentClient,
        supervisor: ActorRef,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.index = index
        self.ledger = ledger
        self._journal = journal
        self._rings = Rings(segments, self._seen, lambda: self._wakes.wake_all(), put_event)
        self.meeting = Meeting()  # not journalled: members tell a new one which epochs there are
        self._supervisor = supervisor
        self._clock = clock
        self._wakes = Wakes()
        self._pending = Pending(journal, self._state, lambda kind, data: self._report(kind, data), clock=clock)
        self._unaudited: list[Event] = []  # applied to the index, and not yet to the ledger
        self._freed: dict[str, int] = {}  # ring -> its tail, once what freed it is in the journal
        self._renewed: dict[int, float] = {}  # running group -> when progress was last seen
        self._granted: dict[int, float] = {}
        self._put_at: dict[int, float] = {}  # group -> when its newest sample was seen
        self._committed_at = self._sent_back_at = clock()
        self._evaluations = Evaluations(
            index, self._is_living, config.evaluate_start, config.evaluate_end, config.evaluate_every, config.num_pinned,
            num_parts=sum(config.ranks[group] for group in config.rollout_groups),
        )  # fmt: skip
        self._draining = False
        self._short: set[str] = set()  # members that wait for room in a ring of theirs
        self._told_failures = 0  # prompt groups that had failed in a row when that was told last
        self._reports: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open every ring that the index knows, and fold in what happened while no coordinator ran."""
        known = dict(self.index.space.rings)
        for name, space in known.items():
            self._rings.open(name, known=space)
        self._emit(*self._rings.read(known, once_more=True))
        roster = await self._supervisor.call("roster", deadline_s=30, retry=True)
        self._draining = roster["draining"]
        for member, incarnation in roster["dead"]:
            self.meeting.member_dead(member, incarnation)
            if self._is_living(member, incarnation):
                self._emit(self._death(member, incarnation))
        for member, life in roster["groups"].items():
            if life["alive"] and self.index.members.get(member, [None])[0] != life["incarnation"]:
                self._emit(self._birth(member, life["incarnation"]))
        now = self._clock()
        self._renewed = {group.id: now for group in self.index.groups.values() if group.state == "running"}
        self._granted = dict(self._renewed)

    def close(self) -> None:
        """Stop listening to doorbells; memory stays where it is."""
        self._rings.close()
        self._write()
        self._audit()

    def tick(self) -> None:
        """Deadlines that nobody's call would notice: leases without progress, stragglers, a step that cannot fill."""
        if not self._look_for_room():
            return
        now, events = self._clock(), []
        limit = self.config.straggler_deadline_s
        for group in self.index.running():
            if limit is not None and now - self._granted.setdefault(group.id, now) > limit:
                why = f"straggler: not finished within {limit:g} s"
                events.append(self._settle(group.id, group.epoch, "failed", why))
            elif now - self._renewed.setdefault(group.id, now) > self.config.lease_deadline_s:
                why = f"no progress for {self.config.lease_deadline_s:g} s at {group.holder}"
                events.append({"event": "lose", "group": group.id, "epoch": group.epoch, "why": why})
        if events:
            self._emit(*events)
        self._tell_of_failures()
        if now - self._sent_back_at > HOLD_S:
            self._sent_back_at = now
            self._wakes.send_back()
        fatal = self.index.imbalance() or self.index.starving()
        if fatal and not self._draining:
            self._draining = True  # told once; the supervisor ends the run
            self._report("fatal", {"cause": fatal})

    def _tell_of_failures(self) -> None:
        """One report each time twice as many prompt groups in a row have failed."""
        num = self.index.consecutive_failed
        if num >= 2 * self._told_failures and num >= MANY_FAILURES:
            self._report("failing", {"groups": num, "error": self.index.last_error})
            self._told_failures = num
        elif num < self._told_failures:
            self._told_failures = 0

    async def ticking(self, period_s: float) -> None:
        while True:
            self.tick()
            await asyncio.sleep(period_s)

    async def reporting(self) -> None:
        """Forward reports to the supervisor, one by one; a restarted supervisor does not exist, so no retry is kept. One that
        does not arrive is lost, unless it is to end the run."""
        while True:
            kind, data = await self._reports.get()
            call = self._supervisor.call("report", "coordinator", kind, data, deadline_s=30, retry=True)
            if kind == "fatal":
                await call
            else:
                with telling("reports"):
                    await call

    # ---- members ----------------------------------------------------------------------------------------------------

    @endpoint
    async def member_started(self, group: str, incarnation: int, num_ranks: int) -> None:
        if self.index.members.get(group, [-1])[0] < incarnation:
            self._emit({"event": "started", "member": group, "incarnation": incarnation, "ranks": num_ranks})

    @endpoint
    async def member_dead(self, group: str, incarnation: int) -> None:
        """Every process of this incarnation is gone: its puts are read once more, then its leases move on."""
        if self.index.members.get(group, [None, 0, 0])[::2] == [incarnation, 1]:
            self._poll(group, once_more=True)
            self._emit(self._death(group, incarnation))
            self.meeting.member_dead(group, incarnation)

    @endpoint
    async def meet_group(
        self, spec: dict[str, Any], member: str, incarnation: int, after: int, patience_s: float
    ) -> dict[str, Any]:
        """The next epoch of a process group across role groups (`meeting.py`)."""
        return await self.meeting.meet_group(spec, member, incarnation, after, patience_s)

    @endpoint
    async def watch_group(self, spec: dict[str, Any], number: int, lives: list[list[Any]]) -> dict[str, Any]:
        """Waits until an epoch of a process group is over."""
        return await self.meeting.watch_group(spec, number, lives)

    def _is_living(self, member: str, incarnation: int) -> bool:
        return self.index.members.get(member, [None, 0, 0])[::2] == [incarnation, 1]

    def _birth(self, member: str, incarnation: int) -> Event:
        ranks = self.config.ranks[member]
        return {"event": "started", "member": member, "incarnation": incarnation, "ranks": ranks}

    def _death(self, member: str, incarnation: int) -> Event:
        publisher = member == self.config.publisher
        return {"event": "dead", "member": member, "incarnation": incarnation, "publisher": publisher}

    def _fence(self, member: str, incarnation: int) -> None:
        """Calls of an incarnation that is not the living one are refused; its puts before this call are seen first."""
        self._check_alive(member, incarnation)
        self._poll(member)
        self._write()
        self._pending.check()

    def _check_alive(self, member: str, incarnation: int) -> None:
        self._pending.check_room()
        if not self._is_living(member, incarnation):
            raise Refused(
                f"caller must be the living incarnation of {member}, got {incarnation}. "
                "The supervisor has replaced this process; it ends."
            )

    # ---- rings ------------------------------------------------------------------------------------------------------

    @endpoint
    async def open_ring(self, member: str, incarnation: int, rank: int) -> dict[str, Any]:
        """The ring of one producer; made at the first call, taken over at its head by every later incarnation."""
        self._fence(member, incarnation)
        name = f"ring/{member}/{rank}"
        rollout = member in self.config.rollout_groups
        num_bytes = self.config.rollout_ring_bytes if rollout else self.config.column_ring_bytes
        await self._rings.make(name, num_bytes)
        self._fence(member, incarnation)
        if name not in self._rings:
            self._make_ring(name, num_bytes, member)
        self._pending.check()
        return {"ring": name, "bytes": num_bytes}

    def _make_ring(self, name: str, num_bytes: int, member: str, *, overflow: bool = False) -> None:
        capacity = self._rings.open(name, num_bytes)
        event = {"event": "ring", "ring": name, "bytes": capacity, "member": member, "overflow": overflow}
        self._journal_and_apply([event])

    def _poll(self, member: str, *, once_more: bool = False) -> None:
        """See what this member has put up to now."""
        events = self._rings.read(self.index.space.owned_by(member), once_more=once_more)
        if events:
            self._emit(*events)

    def _drop_idle_overflow(self) -> None:
        for name in self.index.space.overflowing():
            if self.index.space.rings[name].idle:
                self._journal_and_apply([{"event": "ring_dropped", "ring": name}])
                self._rings.drop(name)

    # ---- leases -----------------------------------------------------------------------------------------------------

    @endpoint
    async def lease(
        self, member: str, incarnation: int, max_groups: int, held: list[list[int]], rank: int = 0
    ) -> dict[str, Any]:
        """Work for a rank of a rollout replica that works on `held` ([group, epoch] each); waits until there is some. One of:

        {"grants": [{group, epoch, step, position, ring, has_media, have: [[sample, reward, response], ...]}, ...]}
        {"evaluate": {"label", "version", "part", "of"}}: sample these of the held-out prompts with exactly this version; with
        "parts", what was found of all of them: say what they are together;
        {"end": True}: the run needs nothing more.

        What was granted and is not held was in an answer that got lost: it is granted again, the same.
        """

        hold = {(group, epoch) for group, epoch in held}

        def work() -> dict[str, Any] | None:
            return self._work(member, incarnation, rank, max_groups, hold)

        return await self._until(member, incarnation, work, wakes.lease(member))

    def _work(
        self, member: str, incarnation: int, rank: int, max_groups: int, held: set[tuple[int, int]]
    ) -> dict[str, Any] | None:
        label = self._evaluations.due()
        if self.index.done and label is None:
            return {"end": True}
        version = self.index.versions.proved.get(f"{member}/{engine_reader(rank)}")
        if version is None or self._draining:
            return None
        mine = [group for group in self.index.held_by(member) if group.rank == rank]
        unheard = [group for group in mine if (group.id, group.epoch) not in held]
        if unheard:
            return {"grants": [lease_of(self.index, group) for group in unheard]}
        if label is not None:
            target = 0 if label == "start" else self.index.version
            return self._evaluations.part_of(label, version, (member, incarnation, rank)) if version == target else None
        grants = self._grants(member, incarnation, rank, version, min(max_groups, self._share(version) - len(mine)))
        return {"grants": grants} if grants else None

    def _share(self, version: int) -> int:
        """The most prompt groups that one engine may have at once: its part of the steps that it may work for, so that who asks
        first leaves some to the others."""
        rules, num_steps = self.index.rules, len(self.index.open_steps(version))
        return -(-num_steps * (rules.groups_per_step + rules.spare_groups) // max(1, self.index.versions.num_engines))

    @endpoint
    async def evaluation(self, member: str, incarnation: int) -> dict[str, Any]:
        """An evaluation beside the training; waits until there is one that no living member works on. One of:

        {"evaluate": {"label", "version", "slot", "checksum", "attempt"}}: the slot is held until "evaluation.0" proves the
        version, and stays pinned until the label has a result, so that another replica can begin anew; {"end": True}.
        """

        def work() -> dict[str, Any] | None:
            label = None if self._draining else self._evaluations.beside(member, incarnation)
            if label is None:
                return {"end": True} if self.index.done and not self._evaluations.missing() else None
            slot = self.index.versions.pins[label]
            ready, attempt = self.index.versions.slots[slot], self.index.attempt
            self._emit({"event": "hold", "slot": slot, "reader": f"{member}/{EVALUATION_READER}"})
            place = {"slot": slot, "version": ready.version, "checksum": ready.checksum, "attempt": attempt}
            return {"evaluate": {"label": label, **place}}

        return await self._until(member, incarnation, work, wakes.EVALUATIONS)

    def _grants(self, member: str, incarnation: int, rank: int, version: int, max_groups: int) -> list[dict[str, Any]]:
        grants: list[dict[str, Any]] = []
        for step in self.index.open_steps(version):
            for event in self.index.plan_admissions(step):
                self._fold(event)
            for group in self.index.waiting(step):
                if len(grants) >= max_groups:
                    return grants
                entries = self.index.entries(group)
                ring = self._room(f"ring/{member}/{rank}", member, entries, oldest=step == self.index.step)
                if ring is None:
                    return grants
                self._fold({
                    "event": "grant", "group": group.id, "epoch": group.epoch, "member": member, "rank": rank,
                    "incarnation": incarnation, "version": version, "ring": ring, "entries": entries,
                })  # fmt: skip
                self._renewed[group.id] = self._granted[group.id] = self._clock()
                grants.append(lease_of(self.index, group))
        return grants

    def _room(self, name: str, member: str, entries: list[int], *, oldest: bool) -> str | None:
        """A ring that can promise these records; the oldest uncommitted step gets an overflow ring when none can."""
        found = self._place(name, entries, oldest=oldest)
        if found is None:
            self._short.add(member)
        if found is not None and found not in self._rings:
            self._make_ring(found, sum(entries) + _SPARE_BYTES, member, overflow=True)
        return found

    def _place(self, name: str, entries: list[int], *, oldest: bool) -> str | None:
        """The ring of `_room`, which may have to be made yet; None also while memory for it is made."""
        if name in self.index.space.rings and self.index.space.has_room(name, entries):
            self._rings.give_up(name)
            return name
        if not oldest:
            return None
        overflow = f"overflow/{name.removeprefix('ring/')}/{self.index.attempt}.{self.index.num_overflow}"
        return self._rings.prepare(name, overflow, sum(entries) + _SPARE_BYTES, fresh=True)

    @at_once
    def renew(
        self, member: str, incarnation: int, groups: list[list[int]], held: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """Progress was seen on these [group, epoch]; the answer names those of all that are `held` whose lease is lost."""
        for group, epoch in groups:
            if self._leases(member, group, epoch):
                self._renewed[group] = self._clock()
        return {"lost": [[group, epoch] for group, epoch in held or groups if not self._leases(member, group, epoch)]}

    def _leases(self, member: str, group: int, epoch: int) -> bool:
        found = self.index.groups.get(group)
        return found is not None and found.state == "running" and found.epoch == epoch and found.holder == member

    @at_once
    def settle(self, member: str, incarnation: int, group: int, epoch: int, outcome: str, why: str) -> None:
        """A group ends before it is ready: `filtered`; `failed`, without enough rewards; `error` when its data failed (retried,
        then quarantined)."""
        held = self.index.groups.get(group)
        if held is None or held.state != "running" or held.epoch != epoch:
            return  # its lease ended meanwhile
        if outcome == "error":
            self._emit({"event": "error", "group": group, "epoch": epoch, "why": why})
            left = self.index.groups.get(group)
            outcome = left.state if left is not None else "quarantined"
        else:
            self._emit(self._settle(group, epoch, outcome, why))
        if outcome != "filtered":
            self._report("group_error", {"group": group, "epoch": epoch, "why": why, "state": outcome})

    @at_once
    def abandon(self, member: str, incarnation: int, group: int, epoch: int) -> None:
        """The holder of a lease stopped working on it, whatever became of the group: what is left reserved returns."""
        if self.index.space.holds(f"group.{group}.{epoch}"):
            self._emit({"event": "abandon", "group": group, "epoch": epoch})

    def _settle(self, group: int, epoch: int, outcome: str, why: str) -> Event:
        return {"event": "settle", "group": group, "epoch": epoch, "outcome": outcome, "why": why}

    # ---- rounds -----------------------------------------------------------------------------------------------------

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

        def made() -> dict[str, Any] | None:
            found = rounds.find(stream, scope, index)
            if not found:
                rests = step is not None and not self.index.trains(stream, step)
                if rests or self.index.done or self._draining:
                    return {"end": True}  # the same for every rank: one plan is for all of them
                if self._wakes.is_vain(plan, *topics):
                    return None
                planned = self._plan(stream, member, incarnation, step, full=early)
                if planned:
                    self._emit({"event": "rounds", "rounds": planned})
                else:
                    self._wakes.in_vain(plan, *topics)
                found = rounds.find(stream, scope, index)
            return {"rounds": [round_of(self.index, each, rank) for each in found]} if found else None

        return await self._until(member, incarnation, made, *topics)

    def _plan(self, stream: str, member: str, incarnation: int, step: int | None, *, full: bool) -> list[Event]:
        planned = self.index.plan_rounds(stream, member, incarnation, step, full=full)
        spec = self.index.rounds.lanes[stream].spec
        return planned if step is not None or self._reserve_outputs(planned, spec, member) else []

    def _reserve_outputs(self, planned: list[Event], spec: Stream, member: str) -> bool:
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
        tokens = max([max(groups[g].info[RESPONSE][groups[g].at(part, first, n)]) for g, part, first, n in spans])
        return worst_case_bytes(num_rows(spans), [(name, spec.output_bytes_per_token, tokens) for name in spec.outputs])

    @at_once
    def ack(self, member: str, incarnation: int, key: str, rank: int) -> None:
        """This rank read its rows of a round and put its columns; it holds no view of them any more."""
        if self.index.rounds.get(key) is not None:
            self._emit({"event": "ack", "key": key, "rank": rank})

    # ---- versions ---------------------------------------------------------------------------------------------------

    @at_once
    def committed(self, member: str, incarnation: int) -> dict[str, Any]:
        """The newest committed version, with its checksum for each trainable role; None before the first commit of a run."""
        return {
            "version": self.index.version,
            "checksums": self.index.checksums,
            "attempt": self.index.attempt,
            "done": self.index.done,
        }

    @endpoint
    async def await_version(
        self, member: str, incarnation: int, version: int, *, commits: bool = False
    ) -> dict[str, Any]:
        """Waits until `version` or a newer one is committed. Stopping when the run is being stopped, and nothing is yet; not for
        who takes part in this commit."""

        def reached() -> dict[str, Any] | None:
            newest = self.index.version
            if newest is None and not commits:
                self._check_goes_on(f"version {version}")
            return {"version": newest} if newest is not None and newest >= version else None

        return await self._until(member, incarnation, reached)

    @at_once
    def longest_wait(self, member: str, incarnation: int, step: int) -> dict[str, Any]:
        """What a whole step that is not committed yet paid for its longest trajectories, in seconds: from when half of its
        groups were there, and the version it trains on, to when the last was. 0 where samples came before a restart."""
        times = sorted(self._put_at[group] for group in self.index.membership(step) if group in self._put_at)
        if not times:
            return {"longest_wait_s": 0.0}
        half = times[(len(times) - 1) // 2]
        return {"longest_wait_s": max(0.0, times[-1] - max(half, self._committed_at))}

    @at_once
    def commit(
        self,
        member: str,
        incarnation: int,
        attempt: int,
        version: int,
        checksum: int,
        spans: list[Span],
        role: str = "",
    ) -> dict[str, Any]:
        """Every rank of a trainable role (the only one, where none is named) holds version `version` of its weights, trained on
        exactly the rows of `spans`. At most once a version.

        With the last trainable role the version is committed, and its rows are released. Before, this role is prepared: it keeps
        the snapshots of `version` and of the one before, makes no further one, and waits (`await_version`). A death withdraws
        what was prepared. Answers the newest committed version.
        """
        if attempt != self.index.attempt:
            raise Refused(f"commit must come from attempt {self.index.attempt}, got {attempt}. This process is late.")
        roles = self.index.trainable
        if role not in roles and (role or len(roles) != 1):
            raise Refused(
                f"commit must name the role that is trained, one of {', '.join(roles)}, got {role or 'none'}."
            )
        role = role or roles[0]
        if version != self.index.version and self.index.prepared.get(role, {}).get("version") != version:
            check_commit(self.index, role, version, checksum, spans)
            last = set(roles) - {role} <= self.index.prepared.keys()
            self._emit(
                {
                    "event": "commit" if last else "prepared", "role": role, "member": member, "version": version,
                    "checksum": checksum, "attempt": attempt, "spans": spans,
                }
            )  # fmt: skip
            if last:
                self._committed()
        return {"version": self.index.version}

    def _committed(self) -> None:
        self._committed_at = self._clock()
        for times in (self._put_at, self._renewed, self._granted):
            for group in times.keys() - self.index.groups.keys():
                del times[group]
        self._report("committed", self.status())
        unbalanced = self.index.imbalance(scan=False)
        if unbalanced:
            self._report("fatal", {"cause": unbalanced})

    @endpoint
    async def begin_publish(self, member: str, incarnation: int, version: int) -> dict[str, Any]:
        """A slot of the slab that nobody holds; waits while every one is held."""

        def slot() -> dict[str, Any] | None:
            writable = self.index.versions.writable()
            if writable is None:
                return None
            self._emit({"event": "publishing", "slot": writable, "version": version})
            return {"slot": writable}

        return await self._until(member, incarnation, slot, wakes.SLOTS)

    @at_once
    def end_publish(self, member: str, incarnation: int, slot: int, version: int, checksum: int) -> None:
        self._emit({"event": "published", "slot": slot, "version": version, "checksum": checksum})
        for event in self._evaluations.keep(slot, version):
            self._emit(event)
            if event["event"] == "evaluated":
                self._report(
                    "evaluation_skipped", {"version": event["result"]["version"], "why": event["result"]["skipped"]}
                )

    @endpoint
    async def weights(self, member: str, incarnation: int, reader: str, newer_than: int) -> dict[str, Any]:
        """The newest published version above `newer_than`, held for this reader ("role.rank") until it proves it; waits.
        Stopping for one that has none yet, when the run is being stopped."""

        def newest() -> dict[str, Any] | None:
            slot = self.index.versions.newest
            if slot is None or self.index.versions.slots[slot].version <= newer_than:
                if newer_than < 0:
                    self._check_goes_on("weights")
                return {"end": True} if self._closed() else None
            ready = self.index.versions.slots[slot]
            self._emit({"event": "hold", "slot": slot, "reader": f"{member}/{reader}"})
            return {"slot": slot, "version": ready.version, "checksum": ready.checksum, "attempt": self.index.attempt}

        return await self._until(member, incarnation, newest, wakes.WEIGHTS)

    @at_once
    def proved(self, member: str, incarnation: int, reader: str, version: int) -> None:
        """This reader verified the checksum of `version` and serves it from now on."""
        self._emit({"event": "proved", "reader": f"{member}/{reader}", "version": version})

    @at_once
    def let_go(self, member: str, incarnation: int, reader: str) -> None:
        """This reader has done with the slot that it held, and serves what it served before."""
        self._emit({"event": "let_go", "reader": f"{member}/{reader}"})

    @at_once
    def evaluated(self, member: str, incarnation: int, label: str, result: dict[str, Any]) -> None:
        """The result of an evaluation; the first one for a label counts."""
        if label not in self.index.evaluations:
            self._emit({"event": "evaluated", "label": label, "result": result})
            self._report("metrics", {"evaluation": {"label": label, **result}})

    @at_once
    def evaluated_part(self, member: str, incarnation: int, label: str, part: int, found: dict[str, Any]) -> None:
        """What one engine found of its part; the first one counts."""
        if label not in self.index.evaluations and str(part) not in self.index.evaluation_parts.get(label, {}):
            self._emit({"event": "evaluated_part", "label": label, "part": part, "found": found})

    @at_once
    def checkpoint(self, member: str, incarnation: int, version: int) -> dict[str, Any]:
        """The whole index at `version` for a checkpoint, as JSON text: {"state": bytes}, which a call carries beside its header
        however long it is. The journal goes on in a new file that begins with it, where the disk has room for one."""
        if version != self.index.version:
            raise Refused(f"checkpoint must be of the committed version {self.index.version}, got {version}.")
        state = orjson.dumps(self._state())
        with contextlib.suppress(OSError):  # else this file goes on
            self._journal.rotate({"event": "snapshot", "state": orjson.Fragment(state)})
        return {"state": state}

    @endpoint
    async def drain(self) -> None:
        """Hand out nothing more: the run is being stopped. What is in flight may still be put and acknowledged."""
        self._draining = True
        self._wakes.wake_all()

    @endpoint
    async def stats(self) -> dict[str, Any]:
        return self.status()

    def status(self) -> dict[str, Any]:
        """Counters for metrics, the status view and the admin endpoint; O(rings, tasks), never a scan of groups or rows."""
        index = self.index
        rings = {
            name: {"bytes": ring.capacity, "used": ring.head - ring.tail, "reserved": ring.reserved_bytes}
            for name, ring in index.space.rings.items()
        }
        return {
            "attempt": index.attempt, "version": index.version, "groups": dict(index.counts),
            "failed_in_a_row": index.consecutive_failed, "failing": self._failing(),
            "refused_rows": index.refused_rows, "media_bytes": index.media_bytes, "row_bytes": index.row_bytes,
            "staleness": {str(k): v for k, v in sorted(index.staleness.items())},
            "rings": rings, "proved": dict(index.versions.proved), "evaluations": dict(index.evaluations),
            "journal_events": self._journal.num_events, "waiters": len(self._wakes),
        }  # fmt: skip

    def _failing(self) -> str:
        """Empty while prompt groups come through."""
        num = self.index.consecutive_failed
        return f"{num} prompt groups in a row have failed: {self.index.last_error}" if num >= MANY_FAILURES else ""

    def _closed(self) -> bool:
        return self.index.done and self._evaluations.due() is None and not self._evaluations.missing()

    # ---- events and waiting -----------------------------------------------------------------------------------------

    def _fold(self, event: Event) -> None:
        """Of an event that helps nobody, this is all."""
        self.index.apply(event)
        self._pending.add(event)
        if not self._unaudited:
            asyncio.get_running_loop().call_soon(self._audit)  # behind the answers that it leads to
        self._unaudited.append(event)

    def _audit(self) -> None:
        events, self._unaudited = self._unaudited, []
        for event in events:
            self.ledger.apply(event)

    def _apply(self, events: Iterable[Event]) -> set[str]:
        """The topics of `wakes` that these events can help. Nothing of them leaves the process before `_write`."""
        topics: set[str] = set()
        for event in events:
            self._fold(event)
            if event["event"] == "put":
                self._has_room(self.index.space.owner(event["ring"]), topics)
                if "info" in event:
                    self._put_at |= dict.fromkeys((span[0] for span in event["spans"]), self._clock())
            elif event["event"] == "ack":
                self._has_room(event["key"].split("/")[1].rpartition(".")[0], topics)
            else:
                topics.update(wakes.helped(event))
        for name, tail in self.index.freed():
            self._freed[name] = tail
            self._has_room(self.index.space.rings[name].owner, topics)
        ready, filled = self.index.news()
        topics.update([wakes.rounds(stream, step) for stream, step in ready], map(wakes.lease, filled))
        return topics

    def _has_room(self, member: str | None, topics: set[str]) -> None:
        """There is more room in this member's rings: who found none is asked again."""
        if member in self._short:
            self._short.discard(member)
            topics.add(wakes.lease(member))

    def _write(self) -> None:
        """Journal what was applied, and let its effects go."""
        if self._pending.write():
            for name, tail in self._freed.items():
                self._rings.release(name, tail)
            self._freed.clear()

    def _state(self) -> dict[str, Any]:
        """What a new file of the journal, or a checkpoint, begins with."""
        self._audit()
        return {**self.index.dump(), "audit": self.ledger.dump()}

    def _look_for_room(self) -> bool:
        """Whether the journal can go on, or goes on again; while it waits, leases do not run out."""
        if not self._pending.waits:
            return True
        now = self._clock()
        self._renewed = dict.fromkeys(self._renewed, now)
        self._granted = dict.fromkeys(self._granted, now)
        if not self._pending.goes_on():
            return False
        self._write()
        self._wakes.wake_all()
        return True

    def _journal_and_apply(self, events: list[Event]) -> set[str]:
        topics = self._apply(events)
        self._write()
        return topics

    def _emit(self, *events: Event) -> None:
        topics = self._journal_and_apply(list(events))
        self._drop_idle_overflow()
        self._wakes.wake(topics)

    def _seen(self, puts: list[Event]) -> None:
        """Records became visible. Whoever waits for them is asked first, so that one write journals them and what they led to;
        a coordinator that dies before it finds them in their ring again."""
        self._wakes.ask(self._apply(puts))
        self._write()
        self._drop_idle_overflow()

    def _report(self, kind: str, data: dict[str, Any]) -> None:
        self._reports.put_nowait((kind, data))

    async def _until(
        self, member: str, incarnation: int, answer: Callable[[], dict[str, Any] | None], *topics: str
    ) -> dict[str, Any]:
        """Ask again after every event that helps one of the topics (any event without topics) until there is an answer, which
        goes out at once and is the endpoint's result; the caller's deadline cancels this."""
        send = answering()

        def asked() -> dict[str, Any] | None:
            self._check_alive(member, incarnation)
            found = answer()
            if found is not None:
                self._write()
                self._pending.check()
                send(found)
            return found

        self._fence(member, incarnation)
        result = answer()
        if result is None:
            result = await self._wakes.wait(asked, *topics)
        self._write()
        self._pending.check()
        return result

    def _check_goes_on(self, what: str) -> None:
        if self._draining:
            raise Stopping(f"{what} must be there for this role to begin, got none: the run is being stopped.")
