"""Which events happen, and the one order in which they take effect: what every part of the coordinator stands on.

Owns the state (index, ledger, what waits for the journal), the rings and their room, and who waits for what. Does not own what
members may ask for: leases (`leasing.py`), rounds (`consuming.py`), versions (`publishing.py`).

    doorbell or call -> events -> index.apply -> journal.append -> tails move, answer
                                      `-> waiters wake: what a put gives them is journalled together with it

Invariant: nothing of an event leaves the process before it is in the journal.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import orjson

from rondo.comm.bus import wakes
from rondo.comm.bus.accounts import Rules
from rondo.comm.bus.audit import Ledger
from rondo.comm.bus.curriculum import Rests
from rondo.comm.bus.evaluations import Evaluations
from rondo.comm.bus.floor import Floor
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event, Journal
from rondo.comm.bus.lookahead import Lookahead
from rondo.comm.bus.pending import Pending
from rondo.comm.bus.puts import put_event
from rondo.comm.bus.rings import Rings
from rondo.comm.bus.rounds import Stream
from rondo.comm.bus.wakes import Wakes
from rondo.comm.groups.meeting import Meeting
from rondo.runtime.actors.actor import Actor, answering, endpoint
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import Refused, Stopping
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.waits import Wait

P = ParamSpec("P")
T = TypeVar("T")

MANY_FAILURES = 8
"""So many failed prompt groups in a row are told of, long before they end the run."""
_SPARE_BYTES = 1 << 16
"""Of an overflow ring beyond its records: it is empty and used once, so nothing wraps."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What `launch` decides and the coordinator holds to. Written as JSON into the run directory."""

    rules: Rules
    publisher: str  # the group that publishes weights
    rollout_ring_bytes: int
    column_ring_bytes: int
    rollout_groups: tuple[str, ...]  # replicas at the start; more may come, and some leave
    ranks: dict[str, int]  # of a group at the start -> processes
    lease_deadline_s: float
    straggler_deadline_s: float | None = None
    evaluate_start: bool = True
    evaluate_end: bool = True
    evaluate_every: int | None = None  # steps; these evaluations run beside the training
    num_pinned: int = 0  # versions that the slab keeps for them
    min_engines: int = 0  # fewest healthy ones, over all replicas
    min_engines_deadline_s: float = 1800.0
    below_min_engines: str = "stop"  # or fail: after the deadline

    def generates(self, member: str) -> bool:
        """Whether it is a replica of those that generate, there from the start or not."""
        return member.rpartition("-")[0] in {name.rpartition("-")[0] for name in self.rollout_groups}

    @classmethod
    def load(cls, path: Path) -> CoordinatorConfig:
        fields = orjson.loads(path.read_bytes())
        rules = fields["rules"]
        rules["streams"] = tuple(
            Stream(**{**s, "inputs": tuple(s["inputs"]), "outputs": tuple(s["outputs"])}) for s in rules["streams"]
        )
        rules["base_columns"] = tuple(rules["base_columns"])
        rules["rests"] = Rests(**rules["rests"]) if rules.get("rests") else None
        fields["rollout_groups"] = tuple(fields["rollout_groups"])
        return cls(**{**fields, "rules": Rules(**rules)})


def at_once(method: Callable[Concatenate[Any, str, int, P], T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """An endpoint of a member (its name and incarnation come first) that waits for nothing: who is not the living incarnation is
    refused, what it put before is seen first, and the answer goes when all that it says is in the journal."""

    @functools.wraps(method)
    async def answer(self: Transitions, member: str, incarnation: int, *args: P.args, **kwargs: P.kwargs) -> T:
        self._fence(member, incarnation)
        found = method(self, member, incarnation, *args, **kwargs)
        self._pending.check()
        return found

    return endpoint(answer)


class Transitions(Actor):
    """The state of a coordinator, and its one way to change it."""

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
        self._lookahead = Lookahead()
        self._floor = Floor(config.min_engines, config.min_engines_deadline_s, config.below_min_engines)
        self._below: Wait | None = None
        self._draining = False
        self._draining_members: dict[
            str, int
        ] = {}  # get nothing more -> their incarnations; not journalled: the roster says it
        self._leaving: set[tuple[str, int]] = set()  # of those, who was told that no more rounds come
        self._short: set[str] = set()  # members that wait for room in a ring of theirs
        self._told_failures = 0  # prompt groups that had failed in a row when that was told last
        self._reports: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    # ---- who speaks -------------------------------------------------------------------------------------------------

    def _is_living(self, member: str, incarnation: int) -> bool:
        return self.index.members.get(member, [None, 0, 0])[::2] == [incarnation, 1]

    def _drains(self, member: str, incarnation: int) -> bool:
        """Whether this member alone gets nothing more, and ends when it has done what it has."""
        return self._draining_members.get(member) == incarnation

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

    def _check_goes_on(self, what: str) -> None:
        if self._draining:
            raise Stopping(f"{what} must be there for this role to begin, got none: the run is being stopped.")

    # ---- rings ------------------------------------------------------------------------------------------------------

    def _make_ring(self, name: str, num_bytes: int, member: str, *, overflow: bool = False) -> None:
        capacity = self._rings.open(name, num_bytes)
        event = {"event": "ring", "ring": name, "bytes": capacity, "member": member, "overflow": overflow}
        self._journal_and_apply([event])

    def _poll(self, member: str, *, once_more: bool = False) -> None:
        """See what this member has put up to now."""
        events = self._rings.read(self.index.space.owned_by(member), once_more=once_more)
        if events:
            self._emit(*events)

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

    def _drop_idle(self) -> None:
        """Rings that serve one grant, and those whose producers have left, go when nobody needs what is in them."""
        for name in self.index.space.idle():
            self._journal_and_apply([{"event": "ring_dropped", "ring": name}])
            self._rings.drop(name)

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
                    now = self._clock()
                    for group, *_ in event["spans"]:
                        if group in self.index.groups:  # else its step may be over, with which its time goes
                            self._put_at[group] = now
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
        self._drop_idle()
        self._wakes.wake(topics)

    def _seen(self, puts: list[Event]) -> None:
        """Records became visible. Whoever waits for them is asked first, so that one write journals them and what they led to;
        a coordinator that dies before it finds them in their ring again."""
        self._wakes.ask(self._apply(puts))
        self._write()
        self._drop_idle()

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

    def status(self) -> dict[str, Any]:
        """Counters for metrics, the status view and the admin endpoint; O(rings, tasks), never a scan of groups or rows."""
        index, failed = self.index, self.index.consecutive_failed
        why = f"{failed} prompt groups in a row have failed: {index.last_error}" if failed >= MANY_FAILURES else ""
        rings = {
            name: {"bytes": ring.capacity, "used": ring.head - ring.tail, "reserved": ring.reserved_bytes}
            for name, ring in index.space.rings.items()
        }
        return {
            "attempt": index.attempt, "version": index.version, "groups": dict(index.counts),
            "failed_in_a_row": failed, "failing": why,
            "refused_rows": index.refused_rows, "media_bytes": index.media_bytes, "row_bytes": index.row_bytes,
            "left_out": dict(index.left_out),
            "staleness": {str(k): v for k, v in sorted(index.staleness.items())},
            "rings": rings, "proved": dict(index.versions.proved), "num_evaluations": len(index.evaluations),
            "engines": {**asdict(self._floor.engines), "least": self._floor.least, "below": self._floor.why},
            "journal_events": self._journal.num_events, "waiters": len(self._wakes),
        }  # fmt: skip
