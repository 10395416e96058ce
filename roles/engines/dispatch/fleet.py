"""The engines of a dispatcher: which there are, which may be given work, and how one that failed comes back.

Owns every engine's health, breaker, proved version, and the task that watches it. Does not own the requests (`dispatcher.py`),
the choice among engines (`placement.py`), how one of them takes weights (`installing.py`) or in which order (`rolling.py`).

    routable:  answers `ready()`, breaker closed, weights proved and no older than what was promised, not being updated

Invariant: an engine that a request says is gone or strange (`faults.py`), that failed an update or was silent is `suspect`:
nothing is sent to it until it has answered again and said which weights it serves. An engine whose weights are too old, or
unknown, is given the newest ones (`reload`) before it is routable. So no token is sampled under weights that nobody proved. What
an engine has in flight is given up when it has been silent for `silent_s`, or when its weights are not known any more, and for
no other reason.

An engine may offer, beside `Engine`: `ready() -> bool` (it takes requests now), `load()` (`EngineLoad`) and
`proved_version() -> int | None` (what it serves, asked of the server itself; without it `version` is believed). One that is away
is asked again for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rondo.roles.engines.dispatch.breaker import Breaker
from rondo.roles.engines.engine import Engine, Request, SamplingParams
from rondo.roles.engines.faults import Fault, fault_of, is_full
from rondo.runtime.errors import ConfigError, DeadlineExceeded, PeerGone
from rondo.runtime.waits import happens, until, wait_for, waiting

_UNKNOWN_SLOTS = 256


class EngineLoad(Protocol):
    """What an engine says it has, everybody's requests together."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class NoEngine(PeerGone):
    """No engine took a request in time. `missing`: every engine's name and what keeps it away."""

    def __init__(self, what: str, missing: tuple[tuple[str, str], ...]) -> None:
        told = "; ".join(f"{name}: {why}" for name, why in missing) or "there is no engine at all"
        super().__init__(f"{what}, got none. Missing are {told}. Start or repair one of them")
        self.missing = missing


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of a dispatcher. Seconds, unless said otherwise."""

    in_flight: int | None = None
    """Requests that one engine is given at a time; None: a quarter more than it runs at once, which hides the way there while
    what waits can still be ordered here."""
    queue_deadline_s: float = 3600.0
    """A request waits so long for its turn, or for room where engines are full, while some engine works."""
    absent_deadline_s: float = 600.0
    """And so long while none does."""
    health_interval_s: float = 2.0
    absent_interval_s: float = 0.25
    """An engine that is away is asked after so long, then after twice that, up to `health_interval_s`."""
    probe_deadline_s: float = 10.0
    silent_s: float = 30.0
    """An engine that has not been ready for so long has lost what it has in flight."""
    failures: int = 3
    """So many requests in a row that an engine fails open its breaker."""
    open_s: float = 1.0
    longest_open_s: float = 60.0
    most_kills: int = 2
    """A request that so many engines died of at its beginning is given to no other; one more where it had come further."""
    most_attempts: int = 8
    """A request that so many engines failed under without a new token is told to be the reason."""
    update_deadline_s: float | None = None
    """One engine's update; None: as `Patience` (`installing.py`) learns from those before it."""
    least_update_s: float = 60.0
    """And no less than this."""
    updating_share: float = 0.5
    """Of the engines that serve, at most so much is being updated at a time (at least one engine)."""


@dataclass(slots=True, eq=False)
class Member:
    """One engine. `load` is in tokens: ours in flight, and others' as far as the engine tells."""

    name: str
    engine: Engine
    breaker: Breaker
    ready_at: float
    most: int | None
    """As `DispatchLimits.in_flight`."""
    installed: int | None = None
    """The version that it was given here."""
    proved: int | None = None
    """The version that it is known to serve."""
    torn: int | None = None
    """The version that it told when an update failed: what it has since is unknown until it tells another one."""
    alive: bool = True
    suspect: bool = True
    """Until it was looked at."""
    hears: bool = True
    """It gave an answer when it was asked last, though perhaps that it is not ready."""
    missed: int = 0
    """How often in a row it was not ready."""
    updating: bool = False
    leaving: bool = False
    """It is given nothing more, and is taken out."""
    why: str = "it has not answered yet"
    in_flight: int = 0
    load: float = 0.0
    foreign: float = 0.0
    jobs: set[Any] = field(default_factory=set)
    trial: object | None = None
    """The one request here that engines may have died of."""
    num_served: int = 0
    num_failed: int = 0
    updates_failed: int = 0
    repair_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def takes_weights(self) -> bool:
        """Whether it may be asked to: it answers, or it failed to, which may have left it paused and never ready again."""
        answers = (self.alive and not self.suspect) or (self.hears and self.updates_failed > 0)
        return answers and not self.leaving

    @property
    def limit(self) -> int:
        if self.most is None:
            slots = self.engine.stats().num_slots or _UNKNOWN_SLOTS
            self.most = slots + max(1, slots // 4)
        return self.most


class Owner(Protocol):
    """Whoever has the requests."""

    def changed(self) -> None:
        """Something that could let a request begin."""

    def seen(self, member: Member) -> None:
        """It was just asked how it is."""

    def lose(self, member: Member, *, silent: bool) -> None:
        """What it has in flight is lost; `silent`: with the engine itself."""

    def broken(self, error: BaseException) -> None:
        """Engines are not watched any more."""

    async def repair(self, member: Member) -> None:
        """After every look at it."""


class Fleet:
    """Engines and their health. Used on one event loop."""

    def __init__(self, limits: DispatchLimits, clock: Callable[[], float], owner: Owner, chance: random.Random) -> None:
        self.limits, self.clock = limits, clock
        self.members: list[Member] = []
        self.promised: int | None = None
        """What the last update that came to its end was of: nothing older is routable. None: nothing was promised."""
        self.moved = asyncio.Event()
        """Set at every change; whoever waits for one clears it first."""
        self.routable: list[Member] = []
        """Those that may be given work, full or not."""
        self.version = -1
        """The oldest proved version among the engines that serve; while none does, what it was last."""
        self.owner, self._chance = owner, chance
        self._watchers: dict[Member, asyncio.Task[None]] = {}

    # ---- who may be given work --------------------------------------------------------------------------------------

    def candidates(self) -> list[Member]:
        """Those that may be given one more request now."""
        return [m for m in self.routable if m.in_flight < m.limit]

    def missing(self) -> tuple[tuple[str, str], ...]:
        """Every engine that is not routable, and why."""
        return tuple((m.name, self._why(m)) for m in self.members if m not in self.routable)

    def serves(self, member: Member) -> bool:
        """Healthy and with proved weights; perhaps being updated, perhaps resting."""
        proved = member.proved is not None and (self.promised is None or member.proved >= self.promised)
        return proved and member.alive and not (member.suspect or member.leaving)

    def _why(self, member: Member) -> str:
        if member.leaving:
            return "it is being taken out"
        if member.updating:
            return "its weights are being updated"
        if not member.breaker.closed:
            return f"its breaker is open ({member.breaker.why})"
        if member.alive and not member.suspect and self.promised is not None:
            return f"it has version {member.proved}, not the promised {self.promised} ({member.why})"
        return member.why

    def update(self) -> None:
        """After any change of any engine."""
        serving = [m for m in self.members if self.serves(m)]
        self.routable = [m for m in serving if not m.updating and m.breaker.closed]
        proved = [m.proved for m in serving if m.proved is not None]
        if proved:
            self.version = min(proved)
        self.moved.set()
        self.owner.changed()

    # ---- their watchers ---------------------------------------------------------------------------------------------

    def add(self, name: str, engine: Engine) -> Member:
        """It is looked at before it is given work. Needs the running loop."""
        if any(m.name == name for m in self.members):
            raise ConfigError(f"the name of an engine must be its own, got {name!r} twice. Give it another")
        limits = self.limits
        breaker = Breaker(
            failures=limits.failures, open_s=limits.open_s, longest_open_s=limits.longest_open_s, chance=self._chance
        )
        member = Member(name, engine, breaker, self.clock(), limits.in_flight)
        self.members.append(member)
        task = asyncio.create_task(self._watch(member), name=f"watch {name}")
        task.add_done_callback(self._watched)
        self._watchers[member] = task
        return member

    async def proved(self, member: Member, deadline_s: float) -> None:
        """Until it serves what was promised. Raises PeerGone where it fails the update, or is taken out, and DeadlineExceeded."""
        async with waiting("engine to serve", peer=member.name, deadline_s=deadline_s):
            while not self.serves(member):
                self.moved.clear()
                if member.torn is not None or member.leaving:
                    raise PeerGone(
                        f"the engine {member.name} must take the newest weights, got {self._why(member)}. Read its log"
                    )
                await self.moved.wait()

    async def drain(self, member: Member, deadline_s: float) -> None:
        """Sends it nothing new; what it has in flight, and an update, has `deadline_s` seconds to end there, and requests then go
        elsewhere. Cancelled, it takes part as before."""
        member.leaving = True
        self.update()
        try:
            async with waiting("engine to drain", peer=member.name, deadline_s=deadline_s):
                await until(self.moved, lambda: not (member.in_flight or member.updating))
        except DeadlineExceeded:
            self.owner.lose(member, silent=False)
        except BaseException:
            member.leaving = False
            self.update()
            raise

    async def remove(self, member: Member) -> None:
        """Takes it out, once what it has in flight has been told to go elsewhere."""
        member.leaving = True
        self.owner.lose(member, silent=False)
        watcher = self._watchers.pop(member)
        watcher.cancel()  # and an update that it gives
        await asyncio.wait([watcher])
        async with waiting("engine to let go", peer=member.name, deadline_s=None):
            await until(self.moved, lambda: not (member.in_flight or member.updating))
        self.members.remove(member)
        self.update()

    async def close(self) -> None:
        for task in self._watchers.values():
            task.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    def _watched(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.owner.broken(error)

    # ---- what requests say ------------------------------------------------------------------------------------------

    def failed(self, member: Member, request_id: str, error: BaseException, fault: Fault) -> None:
        """A request failed there. What else is in flight goes on."""
        member.num_failed += 1
        member.why = f"{type(error).__name__}: {error}"
        if fault == "engine":
            member.suspect = True
        else:
            member.breaker.failed(self.clock(), request_id, member.why, full=is_full(error))
        member.wake.set()
        self.update()

    def served(self, member: Member) -> None:
        """It ended a request well."""
        member.num_served += 1
        was_closed = member.breaker.closed
        member.breaker.succeeded()
        if not was_closed:
            self.update()

    # ---- health -----------------------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        while True:
            member.wake.clear()
            if not member.updating:
                await self._look(member)
                if self.serves(member) and member.breaker.state(self.clock()) == "half-open":
                    await self._try(member)
                await self.owner.repair(member)
            self.owner.seen(member)
            await happens(member.wake, self._pause_s(member))

    def _pause_s(self, member: Member) -> float:
        limits = self.limits
        pause_s = limits.health_interval_s
        if member.trial is not None:
            pause_s = limits.absent_interval_s
        elif not member.alive:
            pause_s = limits.absent_interval_s * 2 ** min(member.missed - 1, 16)
        rests_s = member.breaker.rests_s(self.clock())
        return min(pause_s, limits.health_interval_s, rests_s if rests_s > 0 else pause_s)

    async def _look(self, member: Member) -> None:
        """Asks the engine how it is. While it is being updated, it is the update that tells."""
        ready: Any = getattr(member.engine, "ready", None)
        load: Any = getattr(member.engine, "load", None)
        error: BaseException | None = None
        alive = False
        try:
            alive = True if ready is None else await self._ask(member, "engine ready", ready())
            if alive and member.suspect:
                await self._prove(member)
            told = await self._ask(member, "engine load", load()) if alive and load is not None else None
        except Exception as failure:  # noqa: BLE001 - whatever it is, this engine is out and its error told
            alive, error = False, failure
        else:
            error = None if alive else await self.silence(member)
        if member.updating:
            return
        if not alive:
            self._not_ready(member, error)
            return
        member.missed, member.ready_at, member.hears = 0, self.clock(), True
        if told is not None:
            self._weigh(member, told)
        if not member.alive:
            member.alive = True
            member.breaker.recovered()
        self.update()

    def _not_ready(self, member: Member, error: BaseException | None) -> None:
        """It failed a look with `error`; None: it said that it is not ready."""
        member.hears = error is None
        if error is None:
            error = PeerGone(f"the engine {member.name} must be ready, got that it is not")
        if not (member.hears and member.updates_failed):  # that is why it is not ready
            member.why = f"{type(error).__name__}: {error}"
        member.num_failed += member.alive
        member.alive, member.suspect = False, True
        member.missed += 1
        member.wake.clear()  # it was just asked: the next time is after the pause
        if self.clock() - member.ready_at >= self.limits.silent_s:
            self.owner.lose(member, silent=True)
        self.update()

    async def silence(self, member: Member) -> Exception | None:
        """Asks whether anybody is there at all; None if so."""
        ask: Any = getattr(member.engine, "proved_version", None)
        try:
            if ask is not None:
                await self._ask(member, "engine version", ask())
        except (PeerGone, DeadlineExceeded) as error:
            return error
        except Exception:  # noqa: BLE001 - an answer, whatever it says
            return None
        return None

    async def _prove(self, member: Member) -> None:
        """Asks which weights it serves, and trusts it again."""
        ask: Any = getattr(member.engine, "proved_version", None)
        told = member.engine.version if ask is None else await self._ask(member, "engine version", ask())
        if member.updating:
            return
        if told is None and self.promised is None:
            told = member.engine.version  # nobody was promised other weights than those it was started with
        # What a server says is a number, which another run's weights may carry too.
        known = told != member.torn and (ask is None or told == member.installed or self.promised is None)
        if not known and member.proved is not None:
            member.why = f"it serves version {told} where it was given {member.installed}"
        member.proved, member.suspect = told if known else None, False

    async def _try(self, member: Member) -> None:
        """Asks it for one token after its rest."""
        request = Request(f"trial/{member.name}", np.ones(1, np.int32), SamplingParams(1), seed=0, kind="judge")
        try:
            await self._ask(member, "engine trial", member.engine.generate(request))
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine rests on and its error is told
            why = f"{type(error).__name__}: {error}"
            if fault_of(error) != "request":
                member.breaker.failed(self.clock(), request.id, why)
                return
        member.breaker.recovered()
        self.update()

    async def _ask(self, member: Member, name: str, asked: Any) -> Any:
        return await wait_for(asked, name=name, peer=member.name, deadline_s=self.limits.probe_deadline_s)

    def _weigh(self, member: Member, load: EngineLoad) -> None:
        """Requests that are not ours count like ours."""
        others = max(0, load.num_running + load.num_waiting - member.in_flight)
        ours = member.load - member.foreign
        mean = ours / member.in_flight if member.in_flight else 1000.0
        member.load += others * mean - member.foreign
        member.foreign = others * mean
