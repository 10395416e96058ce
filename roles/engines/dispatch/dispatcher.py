"""The dispatcher: several engines behind the `Engine` protocol, of which any may die.

Owns every request from its call to its one outcome: the attempts it took, what they left. Does not own what a failure says
(`faults.py`), the engines' health (`fleet.py`), the wait for one of them (`places.py`) or updates (`rolling.py`).

    generate -> queue -> place -> attempt on A ----------------------------> completion
                  ^                  |  A is full, or answers with an error: A rests, and it goes elsewhere
                  |                  |  A dies: what this attempt made is gone, but for what was told
                  |                  |  A ends it early (it leaves, its server aborts): its tokens become the prefix
                  +------------------+

Invariant: a request ends exactly once, with the completion of its last attempt or with one error. An attempt that is lost is
abandoned before the next begins, and nothing that it may still bring is looked at; each attempt has an id of its own. No attempt
ends for what befalls another request, or another engine. A request that may be what its engine died of (`suspicion.py`) is given
one that has no other such request, the one with the least to lose.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rondo.roles.engines.dispatch.attempts import Told
from rondo.roles.engines.dispatch.breaker import State
from rondo.roles.engines.dispatch.fleet import DispatchLimits, Fleet, Member, NoEngine
from rondo.roles.engines.dispatch.installing import Installer, Reload
from rondo.roles.engines.dispatch.places import Job, Places
from rondo.roles.engines.dispatch.rolling import Rolling
from rondo.roles.engines.dispatch.suspicion import Suspicion
from rondo.roles.engines.engine import Completion, Engine, EngineStats, Request, ended_with
from rondo.roles.engines.faults import RequestFailed, fault_of, is_full, may_have_killed
from rondo.runtime.errors import Closed, ConfigError, Refused, RondoError

if TYPE_CHECKING:
    import torch


_MOST_STRIKES = 2
"""Answers with an error that a request gets of engines which serve others: it is the reason."""


@dataclass(frozen=True, slots=True)
class MemberStats:
    """One engine, at one moment."""

    name: str
    routable: bool
    why: str
    """What keeps it away; empty when it is routable."""
    breaker: State
    version: int | None
    num_in_flight: int
    load_tokens: float
    num_served: int
    num_failed: int
    healthy: bool
    """It is routable, or would be but for an update."""


@dataclass(frozen=True, slots=True)
class DispatchStats:
    """At one moment; the counts of requests and tokens only grow. Every request that began is in flight, waiting, or one of
    completed, cancelled, failed and dropped (its caller left)."""

    num_in_flight: int
    num_waiting: int
    engines: tuple[MemberStats, ...]
    num_requests: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_lost_attempts: int = 0
    """Under way, and without an outcome."""
    num_put_off: int = 0
    """Attempts that an engine would not begin with, since it was full."""
    num_continued: int = 0
    """Attempts that ended early, or were lost, and left tokens, which the next one began with."""
    tokens_delivered: int = 0
    """In completions, without what their requests began with."""


class Dispatcher:
    """`Engine` over `engines` (`names`: one for each, for logs and errors). Made and used on one event loop.

    `version` is the oldest that a routable engine has proved: whoever asks may be given any of them, so no younger one can be
    promised. It never falls, since an engine comes back only with what was promised. Closing it closes its engines.

    `reload` opens the newest published weights for an engine that lost its own between two updates. `seed`: of the chance by
    which rests differ.
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        reload: Reload,
        names: Sequence[str] | None = None,
        limits: DispatchLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._limits = limits or DispatchLimits()
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._fleet = Fleet(self._limits, clock, self, random.Random(seed))
        self._installer = Installer(self._fleet, reload)
        self._rolling = Rolling(self._fleet, self._installer)
        self._places = Places(self._fleet)
        self._ended: BaseException | None = None
        self._num: Counter[str] = Counter()  # those of `DispatchStats` that only grow
        self._left = EngineStats(0, *(0,) * 9)  # of engines that were taken out
        for index, engine in enumerate(engines):
            self.add(names[index] if names is not None else f"engine-{index}", engine)

    # ---- engines ----------------------------------------------------------------------------------------------------

    def add(self, name: str, engine: Engine) -> Member:
        """One more engine: it gets requests once it serves what was promised, and is asked for ever until then. ConfigError for
        a name that another one has."""
        self._check_open()
        return self._fleet.add(name, engine)

    async def serves(self, name: str, *, deadline_s: float) -> None:
        """Until the engine serves what was promised. Raises PeerGone where it fails that update, and DeadlineExceeded."""
        await self._fleet.proved(self._member(name), deadline_s)

    async def drain(self, name: str, *, deadline_s: float) -> None:
        """Nothing new is sent to the engine. What it has in flight has `deadline_s` seconds to end there, then it goes elsewhere.
        Cancelled, the engine takes part as before."""
        await self._fleet.drain(self._member(name), deadline_s)

    async def remove(self, name: str) -> None:
        """Takes the engine out and closes it; what it has in flight goes elsewhere."""
        member = self._member(name)
        await self._fleet.remove(member)
        self._left += member.engine.stats().ended()
        await member.engine.close()

    def _member(self, name: str) -> Member:
        return next(member for member in self._fleet.members if member.name == name)

    @property
    def version(self) -> int:
        return self._fleet.version

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rolls over the engines; see `rolling.py`. On return one engine at least serves `version`, and none an older one."""
        self._check_open()
        await self._rolling.update(version, tensors)

    def progress(self) -> Mapping[str, int]:
        """As the engines say it that have the requests; one that has none yet comes further with whatever is generated."""
        asked = {job.member for job in self._jobs.values() if job.member is not None}
        told = {member: member.engine.progress() for member in asked}
        stats = self.stats()
        waits = -1 - stats.tokens_generated - stats.decode_steps
        at = ((name, job, {} if job.member is None else told[job.member]) for name, job in self._jobs.items())
        return {name: of_engine.get(job.engine_id, waits) for name, job, of_engine in at}

    def stats(self) -> EngineStats:
        """The sums over the engines; what waits here counts as waiting, and requests by their one outcome."""
        sums = sum((member.engine.stats() for member in self._fleet.members), start=self._left)
        return replace(
            sums,
            version=self.version,
            num_waiting=sums.num_waiting + self._places.num_waiting,
            num_completed=self._num["num_completed"],
            num_cancelled=self._num["num_cancelled"],
        )

    def dispatch_stats(self) -> DispatchStats:
        now, routable = self._clock(), self._fleet.routable
        missing = dict(self._fleet.missing())
        engines = tuple(
            MemberStats(
                m.name, m in routable, missing.get(m.name, ""), m.breaker.state(now), m.proved, m.in_flight, m.load,
                m.num_served, m.num_failed, self._fleet.serves(m) and m.breaker.closed,
            )
            for m in self._fleet.members
        )  # fmt: skip
        num_in_flight = sum(member.in_flight for member in self._fleet.members)
        return DispatchStats(num_in_flight, self._places.num_waiting, engines, **self._num)

    async def close(self) -> None:
        if self._ended is None:
            self._end(Closed("the dispatcher must be open, got a call after close. Start another one"))
        await self._fleet.close()
        await self._installer.close()
        await asyncio.gather(*(member.engine.close() for member in self._fleet.members))

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """As `Engine.generate`; besides raises NoEngine when no engine was there, or had room, in time, RequestFailed when
        engines fail or die under this one request, and DeadlineExceeded when its turn did not come."""
        self._check_open()
        if request.id in self._jobs:
            raise ConfigError(f"the id of a request must be unique, got {request.id!r} twice. Rename one")
        task = asyncio.current_task()
        assert task is not None
        told = None if request.progress is None else Told(request.progress)
        job = Job(request, task, task.cancelling(), Suspicion(self._limits.most_kills), told)
        self._jobs[request.id] = job
        self._num["num_requests"] += 1
        outcome = "num_failed"
        try:
            while (completion := await self._attempt(job)) is None:
                pass
            outcome = "num_cancelled" if completion.finish_reason == "cancelled" else "num_completed"
            num_new = len(completion.tokens) - (0 if request.prefix is None else len(request.prefix.tokens))
            self._num["tokens_delivered"] += num_new
            if outcome == "num_completed":
                self._places.placement.ended(request.kind, len(completion.tokens))
            return completion
        except asyncio.CancelledError:
            outcome = "num_dropped"
            raise
        finally:
            self._num[outcome] += 1
            del self._jobs[request.id]

    def cancel(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is None or job.cancelled:
            return
        job.cancelled = True
        if job.member is not None:
            if job.begun:
                job.member.engine.cancel(job.engine_id)
        elif job.place is not None and not job.place.done():
            job.place.set_result(None)

    async def _attempt(self, job: Job) -> Completion | None:
        """One engine's answer; None when the attempt was lost, or ended early."""
        if job.cancelled:
            return ended_with(job.request, "cancelled", job.request.prefix)
        try:
            await self._places.take(job)
            member = job.member
            if member is None or job.withdrawn:  # cancelled meanwhile, or lost with the engine that was given
                job.lost = False
                return None
            job.attempts += 1
            job.engine_id = job.request.id if job.attempts == 1 else f"{job.request.id}~{job.attempts}"
            asked = job.request if job.attempts == 1 else replace(job.request, id=job.engine_id)
            if job.told is not None:
                asked = job.told.attempt(asked, member.engine.version)
            floor = member.proved if self._fleet.promised is not None else None
            job.begun = True
            completion = await member.engine.generate(asked)
            self._check_weights(member, asked, completion, floor)
        except asyncio.CancelledError:
            if not job.lost or job.task.uncancel() > job.cancelling:
                raise
            self._again(job, "abandoned", killed=job.silenced)
            return None
        except RondoError as error:
            failing, fault = job.member, fault_of(error)
            if failing is None or self._ended is not None or fault == "request":
                raise
            if job.lost:  # its own error came first
                job.task.uncancel()
            self._fleet.failed(failing, job.request.id, error, fault)
            self._places.release(job)
            self._went_wrong(job, failing, error)
            return None
        finally:
            self._places.release(job)
        if job.lost:
            job.lost = False
            job.task.uncancel()
        self._fleet.served(member)
        return self._taken(job, completion)

    def _went_wrong(self, job: Job, member: Member, error: RondoError) -> None:
        """What a failed attempt is to its request. Raises where that is at fault, or has been put off for too long."""
        job.failed_on.add(member)
        why = f"{member.name}: {error}"
        if fault_of(error) == "engine":
            self._again(job, why, killed=may_have_killed(error))
            return
        if is_full(error):
            self._put_off(job, why)
            return
        job.strikes += member.breaker.fails_only(job.request.id)  # it serves others
        if job.strikes >= _MOST_STRIKES and not job.cancelled:
            raise RequestFailed(
                f"request {job.request.id!r} must be answered by engines that answer others, got {why}. Look at what it asks for"
            ) from error
        self._again(job, why)

    def _put_off(self, job: Job, why: str) -> None:
        """It goes elsewhere, or waits until an engine has rested. Raises NoEngine when that has lasted too long."""
        now, deadline_s = self._clock(), self._limits.queue_deadline_s
        self._num["num_put_off"] += 1
        job.lost = False
        if job.put_off_at is None:
            job.put_off_at = now
        if now - job.put_off_at > deadline_s and not job.cancelled:
            what = (
                f"an engine must have room for request {job.request.id!r} within {deadline_s:g} s (the last said {why})"
            )
            raise NoEngine(what, self._fleet.missing())

    def _check_weights(self, member: Member, asked: Request, completion: Completion, floor: int | None) -> None:
        """Weights only go forward: an older token is of a server that was started anew and not looked at yet."""
        new = completion.policy_versions[0 if asked.prefix is None else len(asked.prefix.tokens) :]
        if floor is not None and new.size and new.min() < floor:
            raise Refused(
                f"the engine {member.name} must sample under version {floor} or newer, got {new.min()}. "
                "Its server was started anew, or somebody else gave it weights"
            )

    def _taken(self, job: Job, completion: Completion) -> Completion | None:
        """The outcome, or None where the engine ended early what nobody asked it to."""
        reason = completion.finish_reason
        if completion.request_id != job.request.id:
            completion = replace(completion, request_id=job.request.id)
        if reason in ("stop", "length") or (reason == "cancelled" and job.cancelled):
            return completion
        if reason == "interrupted" and job.request.on_new_weights == "interrupt":
            return completion  # whoever asked goes on with it
        num_tokens = len(completion.tokens)
        before = 0 if job.request.prefix is None else len(job.request.prefix.tokens)
        if num_tokens >= job.request.params.max_new_tokens:
            return replace(completion, finish_reason="length")
        if num_tokens > before:
            job.request = replace(job.request, prefix=completion.as_prefix())
            job.why.clear()
            job.strikes, job.put_off_at = 0, None
            self._num["num_continued"] += 1
        self._again(job, f"ended early as {reason!r}")
        return None

    def _again(self, job: Job, why: str, *, killed: bool = False) -> None:
        """The attempt is over without an outcome; `killed`: it had an engine that ended meanwhile. Raises RequestFailed."""
        job.lost = job.silenced = False
        if job.told is not None and (kept := job.told.lost(job.request)) is not job.request:
            job.request = kept
            self._num["num_continued"] += 1
        self._num["num_lost_attempts"] += 1
        job.why.append(why)
        if killed:
            job.suspicion.died(begun=job.has_token)
            job.bereft_at = self._clock()
        if job.cancelled:
            return
        if job.suspicion.found_out or len(job.why) >= self._limits.most_attempts:
            rule = "leave its engines alive" if job.suspicion.found_out else f"be answered in {len(job.why)} attempts"
            raise RequestFailed(
                f"request {job.request.id!r} must {rule}, got {'; '.join(job.why)}. "
                "Look at the engines' logs for what this request does to them"
            )

    # ---- what the fleet tells ---------------------------------------------------------------------------------------

    def changed(self) -> None:
        self._places.watch_absence()
        self._places.pump()

    def seen(self, member: Member) -> None:
        self._places.seen(member)

    def lose(self, member: Member, *, silent: bool) -> None:
        """Ends the attempts on an engine, so that its requests go elsewhere."""
        for job in list(member.jobs):
            if not job.lost:
                job.lost, job.silenced = True, silent
                if job.begun:
                    job.task.cancel()

    def broken(self, error: BaseException) -> None:
        closed = Closed(f"the dispatcher must be able to watch its engines, got {error!r}. Start another one")
        closed.__cause__ = error
        self._end(closed)

    async def repair(self, member: Member) -> None:
        await self._installer.repair(member)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _end(self, error: BaseException) -> None:
        self._ended = error
        self._places.end(error)
