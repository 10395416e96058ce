"""Places: which engine a request is given, and the wait for one.

Owns one request under way (`Job`), those that wait, and how long they do while there is no engine at all. Does not own the order
of those that wait (`queue.py`), the choice among engines (`placement.py`), nor what becomes of an attempt (`dispatcher.py`).

    others      in the queue's order, to the engine that placement chooses, rather not one that has failed them
    suspects    before them, each to an engine without another suspect, the one with the fewest requests (`suspicion.py`)
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from rondo.roles.engines.dispatch.attempts import Told
from rondo.roles.engines.dispatch.fleet import Fleet, Member, NoEngine
from rondo.roles.engines.dispatch.placement import Key, Placement
from rondo.roles.engines.dispatch.queue import FairQueue
from rondo.roles.engines.dispatch.suspicion import Suspicion
from rondo.roles.engines.engine import Request
from rondo.runtime.waits import waiting


@dataclass(slots=True, eq=False)
class Job:
    """One request under way: as the next attempt asks it, with the prefix that earlier ones left."""

    request: Request
    task: asyncio.Task[object]
    cancelling: int
    """How often the task was cancelled by others."""
    suspicion: Suspicion
    told: Told | None
    since: float = 0.0
    """When it began to wait."""
    member: Member | None = None
    place: asyncio.Future[None] | None = None
    age: int | None = None
    attempts: int = 0
    engine_id: str = ""
    begun: bool = False
    cancelled: bool = False
    lost: bool = False
    silenced: bool = False
    """It was lost with its engine, which was not heard of again."""
    queued: bool = False
    has_token: bool = False
    """Of the engine that has it."""
    cost: float = 0.0
    key: Key | None = None
    why: list[str] = field(default_factory=list)
    bereft_at: float = -math.inf
    """When an engine last died of it, perhaps."""
    strikes: int = 0
    failed_on: set[Member] = field(default_factory=set)
    put_off_at: float | None = None

    @property
    def withdrawn(self) -> bool:
        return self.cancelled or self.lost


class Places:
    """Of the engines of one fleet. Used on one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._limits, self._clock = fleet, fleet.limits, fleet.clock
        self.placement = Placement()
        self._queue: FairQueue[Job] = FairQueue()
        self._suspects: list[Job] = []  # that wait, the oldest first
        self._absent_since: float | None = None
        self._absent: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting + len(self._suspects)

    def _all_waiting(self) -> list[Job]:
        return [*self._suspects, *self._queue.all()]

    async def take(self, job: Job) -> None:
        """Gives it an engine, at once or when it is its turn; none where it is cancelled meanwhile. Raises NoEngine or
        DeadlineExceeded."""
        behind = self._suspects if job.suspicion.suspected else self._queue.num_waiting
        if behind or not self._give(job, self._fleet.candidates()):
            await self._wait(job)

    def _give(self, job: Job, candidates: list[Member]) -> bool:
        """Gives it one of these; False if none is for it."""
        request, suspected = job.request, job.suspicion.suspected
        job.cost = self.placement.cost(request)
        if suspected:
            # Engines that something else kills together must not look as if it had: each has to answer again first.
            free = [m for m in candidates if m.trial is None and m.ready_at >= job.bereft_at]
            member = min(free, key=lambda m: m.in_flight, default=None)
        else:
            if job.key is None:
                job.key = self.placement.key(request)
            elsewhere = [m for m in candidates if m not in job.failed_on]
            member = self.placement.choose(job.key, job.cost, elsewhere or candidates)
        if member is None:
            return False
        if suspected:
            member.trial = job
            member.wake.set()
        member.jobs.add(job)
        member.in_flight += 1
        member.load += job.cost
        job.member, job.begun, job.has_token = member, False, False
        self._queue.began(request.kind)
        return True

    def release(self, job: Job) -> None:
        member = job.member
        if member is None:
            return
        job.member = None
        member.jobs.discard(job)
        member.in_flight -= 1
        member.load = member.load - job.cost if member.in_flight else member.foreign
        if member.trial is job:
            member.trial = None
        if member.leaving:
            self._fleet.moved.set()
        self._queue.ended(job.request.kind)
        if self.num_waiting:
            self.pump()

    async def _wait(self, job: Job) -> None:
        kind, suspected = job.request.kind, job.suspicion.suspected
        if job.age is None:
            job.age = self._queue.age()
        job.place, job.since = asyncio.get_running_loop().create_future(), self._clock()
        job.queued = True
        if suspected:
            self._suspects.append(job)
            for member in self._fleet.routable:
                member.wake.set()
        else:
            self._queue.add(kind, job.request.priority, job.age, job)
        self.watch_absence()
        peer = ", ".join(m.name for m in self._fleet.members) or "no engine yet"
        try:
            async with waiting("engine", peer=peer, deadline_s=self._limits.queue_deadline_s):
                await job.place
        finally:
            job.place = None
            if job.queued:
                job.queued = False
                if suspected:
                    self._suspects.remove(job)
                else:
                    self._queue.remove(kind, job.request.priority, job.age)

    def pump(self) -> None:
        """Gives places to those that wait: suspects, as long as engines are free of them, then the others in their order."""
        for job in list(self._suspects):
            if self._give_waiting(job, self._fleet.candidates()):
                self._suspects.remove(job)
        while self._queue.num_waiting and (candidates := self._fleet.candidates()):
            self._give_waiting(self._queue.pop(), candidates)

    def _give_waiting(self, job: Job, candidates: list[Member]) -> bool:
        """Whether it no longer waits."""
        if job.place is not None and not job.place.done():  # else it is being cancelled or failed
            if not self._give(job, candidates):
                return False
            job.place.set_result(None)
        job.queued = False
        return True

    def seen(self, member: Member) -> None:
        """Which of the requests there it has begun with; a suspect that is among them is cleared."""
        told = member.engine.progress() if member.jobs else {}
        for job in member.jobs:
            if not job.has_token and told.get(job.engine_id, 0) > 0:
                job.has_token = True
                if job.suspicion.has_token() and member.trial is job:
                    member.trial = None
        if self._suspects and member.trial is None:
            self.pump()

    def watch_absence(self) -> None:
        """Requests wait only so long while there is no engine at all."""
        if self._fleet.routable or not self.num_waiting:
            if self._fleet.routable:
                self._absent_since = None
            if self._absent is not None:
                self._absent.cancel()
                self._absent = None
            return
        if self._absent_since is None:
            self._absent_since = self._clock()
        if self._absent is None:
            # When the first of those that wait has waited long enough for any engine at all.
            since = max(self._absent_since, min(job.since for job in self._all_waiting()))
            left_s = since + self._limits.absent_deadline_s - self._clock()
            self._absent = asyncio.get_running_loop().call_later(max(0.0, left_s), self._give_up)

    def _give_up(self) -> None:
        """Fails those that have waited too long for any engine."""
        self._absent = None
        since, deadline_s = self._clock() - self._limits.absent_deadline_s, self._limits.absent_deadline_s
        error = NoEngine(f"an engine must take a request within {deadline_s:g} s", self._fleet.missing())
        for job in self._all_waiting():
            if job.since <= since and job.place is not None and not job.place.done():
                job.place.set_exception(error)
        asyncio.get_running_loop().call_soon(self.watch_absence)

    def end(self, error: BaseException) -> None:
        """Nobody waits any more."""
        if self._absent is not None:
            self._absent.cancel()
        for job in self._all_waiting():
            if job.place is not None and not job.place.done():
                job.place.set_exception(error)
