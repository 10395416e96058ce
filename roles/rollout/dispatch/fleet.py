"""The engines of a dispatcher: which there are, which may be given work, and how one that failed comes back.

Owns every engine's health, breaker, proved version, and the task that watches it. Does not own the requests (`dispatcher.py`),
the choice among engines (`placement.py`) or the order of an update (`rolling.py`).

    routable:  answers `ready()`, breaker not open, weights proved and no older than what was promised, not being updated,
               not leaving

Invariant: an engine that failed a request by going away, failed an update or was silent is `suspect`: nothing is sent to it until
it has answered again and said which weights it serves. An engine whose weights are too old, or unknown, is given the newest ones
(`reload`) before it is routable. So no token is sampled under weights that nobody proved.

An engine may offer, beside `Engine`: `ready() -> bool` (it takes requests now), `load()` (`EngineLoad`) and
`proved_version() -> int | None` (what it serves, asked of the server itself; without it `version` is believed).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rondo.roles.rollout.dispatch.breaker import Breaker
from rondo.roles.rollout.engine import Engine
from rondo.runtime.errors import ConfigError, PeerGone, RondoError
from rondo.runtime.waits import wait_for

if TYPE_CHECKING:
    import torch

Reload = Callable[[], AbstractAsyncContextManager[tuple[int, "Mapping[str, torch.Tensor]"]]]
"""Opens the newest published weights: (version, tensors), readable inside `async with`."""

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
    """A request waits so long for its turn, while some engine works."""
    absent_deadline_s: float = 600.0
    """And so long while none does."""
    health_interval_s: float = 2.0
    absent_interval_s: float = 0.25
    """An engine that is away is asked so often."""
    probe_deadline_s: float = 10.0
    failures: int = 3
    """In a row open the breaker of an engine."""
    open_s: float = 1.0
    longest_open_s: float = 60.0
    most_attempts: int = 8
    """A request that so many engines failed under without a new token is told to be the reason."""
    update_deadline_s: float = 600.0
    """One engine's update; when it is known how long they take, ten times the longest and `update_grace_s`, if that is less."""
    update_grace_s: float = 30.0
    """An engine that is still being updated so long after all others is left behind."""
    update_attempts: int = 3
    """Of an engine that fails its update, before the others go on without it."""
    updating_share: float = 0.5
    """Of the routable engines, at most so much is being updated at a time (at least one engine)."""
    drain_deadline_s: float = 600.0
    """What an engine that is removed has in flight may go on so long; then it is continued elsewhere."""


class Member:
    """One engine. `load` is in tokens: ours in flight, and others' as far as the engine tells."""

    __slots__ = (
        "_limit", "alive", "breaker", "engine", "foreign", "in_flight", "installed", "jobs", "leaving", "load", "name",
        "num_failed", "num_served", "proved", "repair_at", "suspect", "torn", "updates_failed", "updating", "wake", "why",
    )  # fmt: skip

    def __init__(self, name: str, engine: Engine, limits: DispatchLimits) -> None:
        self.name, self.engine = name, engine
        self.breaker = Breaker(failures=limits.failures, open_s=limits.open_s, longest_open_s=limits.longest_open_s)
        self.installed: int | None = None
        """The version that it was given here."""
        self.proved: int | None = None
        """The version that it is known to serve."""
        self.alive = self.suspect = True  # until it was looked at
        self.updating = self.leaving = False
        self.why = "it has not answered yet"
        self.in_flight = 0
        self.load = self.foreign = 0.0
        self.jobs: set[Any] = set()
        self.num_served = self.num_failed = self.updates_failed = 0
        self.repair_at = 0.0
        self.torn: int | None = None
        """The version that it told when an update failed: what it has since is unknown until it tells another one."""
        self.wake = asyncio.Event()
        self._limit = limits.in_flight

    @property
    def takes_weights(self) -> bool:
        """Whether it may be asked to: it answers, or it failed to, which may have left it paused and never ready again."""
        return (self.alive and not self.suspect) or self.updates_failed > 0

    @property
    def limit(self) -> int:
        if self._limit is None:
            slots = self.engine.stats().num_slots or _UNKNOWN_SLOTS
            self._limit = slots + max(1, slots // 4)
        return self._limit


class Fleet:
    """Engines and their health. `changed` is called after every change that could let a request begin; `lost` for an engine whose
    requests in flight are lost. Used on one event loop."""

    def __init__(
        self,
        limits: DispatchLimits,
        clock: Callable[[], float],
        *,
        changed: Callable[[], None],
        lost: Callable[[Member], None],
        broken: Callable[[BaseException], None],
        reload: Reload | None,
    ) -> None:
        self.limits, self.clock = limits, clock
        self.members: list[Member] = []
        self.promised: int | None = None
        """What the last update that came to its end was of: nothing older is routable. None: nothing was promised."""
        self.rolling = False
        """While an update is under way it is what repairs engines."""
        self.moved = asyncio.Event()
        """Set at every change; whoever waits for one clears it first."""
        self._version = -1
        self._longest_update_s: float | None = None
        self._changed, self._lost, self._broken, self._reload = changed, lost, broken, reload
        self._watchers: dict[Member, asyncio.Task[None]] = {}
        self._routable: list[Member] = []

    # ---- who may be given work --------------------------------------------------------------------------------------

    @property
    def routable(self) -> list[Member]:
        """Those that may be given work, full or not."""
        return self._routable

    def candidates(self) -> list[Member]:
        """Those that may be given one more request now."""
        now = self.clock()
        return [m for m in self._routable if m.in_flight < m.limit and m.breaker.admits(now, m.in_flight)]

    @property
    def version(self) -> int:
        """The oldest proved version among the engines that serve; while none does, what it was last."""
        return self._version

    def missing(self) -> tuple[tuple[str, str], ...]:
        """Every engine that is not routable, and why."""
        return tuple((m.name, self._why(m)) for m in self.members if m not in self._routable)

    def _serves(self, member: Member) -> bool:
        """Healthy and with proved weights; perhaps being updated."""
        proved = member.proved is not None and (self.promised is None or member.proved >= self.promised)
        return proved and member.alive and not member.suspect and not member.leaving

    def _is_routable(self, member: Member) -> bool:
        now = self.clock()
        return self._serves(member) and not member.updating and member.breaker.state(now) != "open"

    def _why(self, member: Member) -> str:
        if member.leaving:
            return "it is being removed"
        if member.updating:
            return "its weights are being updated"
        if member.breaker.state(self.clock()) == "open":
            return f"its breaker is open ({member.breaker.why})"
        if member.alive and not member.suspect and self.promised is not None:
            return f"it has version {member.proved}, not the promised {self.promised} ({member.why})"
        return member.why

    def update(self) -> None:
        """After any change of any engine."""
        self._routable = [m for m in self.members if self._is_routable(m)]
        proved = [m.proved for m in self.members if self._serves(m) and m.proved is not None]
        if proved:
            self._version = min(proved)
        self.moved.set()
        self._changed()

    # ---- engines come and go ----------------------------------------------------------------------------------------

    def add(self, name: str, engine: Engine) -> Member:
        """It is looked at before it is given work. Needs the running loop."""
        if any(m.name == name for m in self.members):
            raise ConfigError(f"the name of an engine must be its own, got {name!r} twice. Give it another")
        member = Member(name, engine, self.limits)
        self.members.append(member)
        task = asyncio.create_task(self._watch(member), name=f"watch {name}")
        task.add_done_callback(self._watched)
        self._watchers[member] = task
        return member

    async def drop(self, member: Member) -> None:
        """It is no longer there; its requests must have ended or be lost."""
        self.members.remove(member)
        await self._end([self._watchers.pop(member)])
        self.update()

    async def close(self) -> None:
        await self._end(list(self._watchers.values()))
        self._watchers.clear()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _watched(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken(error)

    # ---- health -----------------------------------------------------------------------------------------------------

    def failed(self, member: Member, error: BaseException, *, gone: bool) -> None:
        """It failed a request or a probe; `gone` when it did not answer, and may be another process when it does again."""
        member.num_failed += 1
        member.why = f"{type(error).__name__}: {error}"
        if gone:
            member.suspect = True
            member.wake.set()
        if member.breaker.failed(self.clock(), member.why):
            self._lost(member)
        self.update()

    def doubt(self, member: Member, error: BaseException) -> None:
        """It refused a request that it took: its weights may not be those that it was given. It is looked at before the next."""
        member.num_failed += 1
        member.why = f"{type(error).__name__}: {error}"
        member.suspect = True
        member.wake.set()
        self.update()

    def served(self, member: Member) -> None:
        """It ended a request well."""
        member.num_served += 1
        was_closed = member.breaker.closed
        member.breaker.succeeded(self.clock())
        if not was_closed:
            self.update()

    def take_out(self, member: Member, error: BaseException) -> None:
        """Its weights are not known any more: what it has in flight is lost."""
        member.proved, member.torn = None, member.engine.version
        member.why = f"its update failed, {type(error).__name__}: {error}"
        self._lost(member)
        member.wake.set()
        self.update()

    async def _watch(self, member: Member) -> None:
        while True:
            member.wake.clear()
            if not member.updating:
                await self._look(member)
                await self._repair(member)
            pause_s = self.limits.health_interval_s if member.alive else self.limits.absent_interval_s
            opens_s = member.breaker.opens_for_s(self.clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, opens_s) if opens_s > 0 else pause_s):
                    await member.wake.wait()

    async def _look(self, member: Member) -> None:
        """Asks the engine how it is. While it is being updated, it is the update that tells."""
        ready: Any = getattr(member.engine, "ready", None)
        load: Any = getattr(member.engine, "load", None)
        was_alive = member.alive
        try:
            alive = True if ready is None else await self._ask(member, "engine ready", ready())
            if alive and member.suspect:
                await self._prove(member)
            told = await self._ask(member, "engine load", load()) if alive and load is not None else None
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine is out and its error told
            if not member.updating:
                member.alive = False
                self.failed(member, error, gone=True)
                member.wake.clear()  # it was just asked: the next time is after the interval
            return
        if member.updating:
            return
        member.alive = alive
        if not alive:
            # What it has in flight may wait there for ever, so a few such answers count like silence.
            self.failed(member, PeerGone(f"the engine {member.name} must be ready, got that it is not"), gone=True)
            member.wake.clear()
            return
        if told is not None:
            self._weigh(member, told)
        if alive and not was_alive:
            member.breaker.recovered()
        self.update()

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

    async def _repair(self, member: Member) -> None:
        """Gives an engine that answers the newest weights, where it has none that may be served."""
        old = self.promised is not None and (member.proved is None or member.proved < self.promised)
        early = self.clock() < member.repair_at
        if not old or early or self._reload is None or not self._may_repair(member):
            return
        try:
            async with self._reload() as (version, tensors):
                if self.promised is not None and version < self.promised:
                    raise PeerGone(f"the newest weights must be of version {self.promised} or newer, got {version}")
                if self._may_repair(member):
                    await self.install(member, version, tensors)
        except RondoError as error:
            member.why = f"it must be given the newest weights, got {type(error).__name__}: {error}"
            self._put_off(member)

    def _put_off(self, member: Member) -> None:
        """It is not given weights again at once."""
        back_off_s = self.limits.open_s * 2 ** min(member.updates_failed, 16)
        member.repair_at = self.clock() + min(back_off_s, self.limits.longest_open_s)
        member.updates_failed += 1

    def _may_repair(self, member: Member) -> bool:
        return member.takes_weights and not (member.leaving or member.updating or self.rolling)

    async def install(self, member: Member, version: int, tensors: Mapping[str, torch.Tensor]) -> Exception | None:
        """Updates one engine; what it failed with, None when it serves this version now. Raises ConfigError if the engine refuses
        the tensors, and keeps its own; whatever else it fails with takes it out."""
        member.updating = True
        self.update()
        deadline_s, began = self.limits.update_deadline_s, self.clock()
        if self._longest_update_s is not None:
            deadline_s = min(deadline_s, 10 * self._longest_update_s + self.limits.update_grace_s)
        try:
            updating = member.engine.update_weights(version, tensors)
            await wait_for(updating, name="update engine", peer=member.name, deadline_s=deadline_s)
            if member.engine.version != version:
                raise PeerGone(
                    f"the engine {member.name} must prove version {version}, got {member.engine.version}. Read its log"
                )
        except ConfigError:
            raise
        except asyncio.CancelledError:
            member.suspect = True
            self._put_off(member)
            self.take_out(member, PeerGone(f"the engine {member.name} must take weights in time, got no end"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine is out and its error told
            member.suspect = True
            self._put_off(member)
            self.take_out(member, error)
            return error
        finally:
            member.updating = False
            member.wake.set()
            self.update()
        self._longest_update_s = max(self._longest_update_s or 0.0, self.clock() - began)
        member.installed = member.proved = version
        member.torn = None
        member.alive, member.suspect = True, False
        member.updates_failed, member.repair_at = 0, 0.0
        member.breaker.recovered()
        self.update()
        return None

    async def _ask(self, member: Member, name: str, asked: Any) -> Any:
        return await wait_for(asked, name=name, peer=member.name, deadline_s=self.limits.probe_deadline_s)

    def _weigh(self, member: Member, load: EngineLoad) -> None:
        """Requests that are not ours count like ours."""
        others = max(0, load.num_running + load.num_waiting - member.in_flight)
        ours = member.load - member.foreign
        mean = ours / member.in_flight if member.in_flight else 1000.0
        member.load += others * mean - member.foreign
        member.foreign = others * mean
