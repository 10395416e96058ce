"""Scaler: what users, and an autoscaler, change the number of replicas with while a run goes on.

Owns the doing: it tells the supervisor which role groups come and leave, several times a second, and every step of a request as
an event. Does not own the decisions (`requests.py`), whether there is room (`room.py`), or the way of a replica (supervision).
It lives in the supervisor's process, so that a coordinator may die and come back meanwhile.

    scaler.ask(Wish("rollout", "scale_out", 3, "more load"))    ->   Request(status=PENDING, request_id="3f2a...")
    scaler.view().requests[0].status                             ->   ACTIVE

For the event loop of the supervisor alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rondo.launch.config import RunConfig
from rondo.launch.elastic.joining import Attach, Detach, GiveUp
from rondo.launch.elastic.request import Replica, Request, Status, Wish
from rondo.launch.elastic.requests import Add, Drain, Order, Requests, Stay, replicas_of
from rondo.launch.elastic.room import Room
from rondo.launch.groups import TRAINED
from rondo.launch.machine import num_cores
from rondo.launch.plan import spec_of
from rondo.roles.engines.sglang.requirements import address_of
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.records.telling import tell_every
from rondo.runtime.supervision.orders import Phase
from rondo.runtime.supervision.spec import GroupView
from rondo.runtime.supervision.supervisor import Supervisor
from rondo.runtime.waits import waiting

DRAIN_S = 300.0
"""Replicas that leave have so long to end what they have, unless a request says otherwise; then it goes to others."""
_TIMES = 8
"""So many times the cores, or the replicas of the settings, may there be of replicas without devices."""
_TICK_S = 0.25
_ENGINES_S = 2.0
_SLACK_S = 60.0
"""For the way, and for what a replica undoes."""
_TOLD = ("request_id", "status", "role", "action", "num_replicas", "reason", "message", "error_message")


@dataclass(frozen=True, slots=True)
class EngineView:
    """One replica. `weight_version`: the newest version that it has proved, where it follows weights; `origin`: "initial" or
    "scaled"; `group`: its role group."""

    engine_id: str
    group: str
    origin: str
    state: str
    healthy: bool
    incarnation: int
    restarts: int
    weight_version: int | None
    url: str = ""


@dataclass(frozen=True, slots=True)
class ScalingView:
    """`replicas`: role -> those that are there and stay or come, of every role whose number may change."""

    replicas: Mapping[str, tuple[str, ...]]
    active: Request | None
    requests: tuple[Request, ...]
    """The newest first."""


class Scaler:
    """`tell` writes an event (kind, data); `proved` gives the versions that readers of weights have proved, by
    "<replica>/<role>.<rank>"; `ref` gives the actor of a process by "<replica>.<rank>". `fixed`: the run's role groups are not
    those of its settings, and stay."""

    def __init__(
        self,
        supervisor: Supervisor,
        config: RunConfig,
        run: Path,
        tell: Callable[[str, Mapping[str, Any]], None],
        proved: Callable[[], Mapping[str, int]] = dict,
        ref: Callable[[str], ActorRef] | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        self._supervisor, self._config = supervisor, config
        self._tell, self._proved, self._clock = tell, proved, time.monotonic
        self._room, self._run = Room(config, run), run
        self._groups = {
            group.name: group for group in config.role_groups if not (fixed or set(TRAINED) & set(group.roles))
        }
        limits = config.supervision
        self._requests = Requests(
            {role: group.name for group in self._groups.values() for role in group.roles},
            {group.name: group.replicas for group in self._groups.values()},
            self._admit,
            drain_s=DRAIN_S,
            start_s=limits.start_s + limits.load_s,
            wall=time.time,
            least=_least(config),
            most=_most(config),
            failure=supervisor.last_failure,
            no_engines=_no_engines(config),
            fixed={
                role: g.name
                for g in config.role_groups
                if set(TRAINED) & set(g.roles) and not fixed
                for role in g.roles
            },
        )
        self._ref = ref
        self._calls: dict[str, asyncio.Task[None]] = {}  # about an engine that runs already, by its address
        self._engines: dict[str, Mapping[str, Any]] = {}  # what its replica said of it last
        self._asked_at = -math.inf
        self._told: Request | None = None

    # ---- requests ---------------------------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> Request:
        """The request of a wish is PENDING, and `get` tells how it goes on; NOOP where it is so already; CONFLICT while another
        request is under way; REJECTED, with the reason, where it cannot be. ConfigError for a role whose number is fixed, or a
        key of another wish."""
        wish = replace(wish, engine_urls=tuple(dict.fromkeys(map(address_of, wish.engine_urls))))
        request = self._requests.ask(wish, self._seen(), self._clock())
        if not wish.dry_run:
            self._told_of(request)
        return request

    def cancel(self, request_id: str) -> Request:
        """Undo the request under way: what came leaves, what was to leave stays. ConfigError for one that is over or unknown."""
        request, orders = self._requests.cancel(request_id, self._seen(), self._clock())
        self._do(orders)
        self._told_of(request)
        return self._requests.get(request_id) or request

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def most(self, role: str) -> int | None:
        """Replicas that a role may have; None where its number is fixed, or devices limit it."""
        return self._requests.most(role)

    def view(self) -> ScalingView:
        seen, roles = self._seen(), self._requests.roles
        replicas = {role: tuple(replicas_of(group, seen)) for role, group in roles.items()}
        return ScalingView(replicas, self._requests.active, self._requests.all())

    def engines(self, role: str) -> list[EngineView]:
        """The replicas of a role, whether their number may change or not. ConfigError for a role that the run has not."""
        group = self._config.group_of(role)
        if group is None:
            raise ConfigError(f"role must be one of this run, got {role!r}. See /roles")
        initial, proved = set(group.replica_names()), self._proved()
        return [
            EngineView(
                view.name, group.name, "initial" if view.name in initial else "scaled", view.state.value,
                view.state.value == "ready", view.incarnation, view.restarts,
                min((v for reader, v in proved.items() if reader.partition("/")[0] == view.name), default=None),
            )
            for view in self._views() if view.role == group.name
        ] + [self._engine(url, name) for url, name in self._requests.attached.items() if role == "rollout"]  # fmt: skip

    def _engine(self, url: str, name: str) -> EngineView:
        """One that was attached, as its replica told it last."""
        told = self._engines.get(url, {})
        state, healthy = told.get("state", "unknown"), bool(told.get("healthy"))
        return EngineView(url, name, "attached", state, healthy, 0, 0, told.get("version"), url)

    # ---- doing ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled."""

        async def turn() -> None:
            self.advance()
            if self._requests.attached and self._clock() - self._asked_at >= _ENGINES_S:
                self._asked_at = self._clock()
                await self._look_at_engines()

        try:
            await tell_every("scaling", _TICK_S, turn)
        finally:
            for call in self._calls.values():
                call.cancel()

    async def _look_at_engines(self) -> None:
        assert self._ref is not None
        for name in set(self._requests.attached.values()):
            try:
                told = await self._ref(f"{name}.0").call("engines", deadline_s=1.0)
            except (RondoError, OSError):
                told = [{"name": url, "state": "unknown"} for url in self._requests.attached]
            self._engines |= {each["name"]: each for each in told}

    async def _is_attached(self, order: Attach | Detach) -> bool:
        """Once a call that was given up has undone what it did, or ended before."""
        assert self._ref is not None
        with suppress(RondoError, OSError):
            async with waiting("engine given up", peer=order.name, deadline_s=_SLACK_S):
                while True:
                    told = await self._ref(f"{order.name}.0").call("engines", deadline_s=_SLACK_S)
                    state = next((each["state"] for each in told if each["name"] == order.url), "")
                    if state not in ("connecting", "weights", "leaving"):
                        return bool(state)
                    await asyncio.sleep(_TICK_S)
        return isinstance(order, Detach)

    async def _call(self, order: Attach | Detach) -> None:
        """Its outcome is the request's; a call that is cancelled undoes itself there."""
        attach = isinstance(order, Attach)
        limit_s = order.deadline_s if isinstance(order, Attach) else order.drain_s
        why = "given up"
        try:
            assert self._ref is not None
            method = "attach_engine" if attach else "detach_engine"
            await self._ref(f"{order.name}.0").call(method, order.url, limit_s, deadline_s=limit_s + _SLACK_S)
            why = ""
        except (RondoError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            why = "" if await self._is_attached(order) == attach else "given up"
        finally:
            del self._calls[order.url]
            self._requests.told(order.url, why)

    def advance(self) -> None:
        """One look, and what follows from it."""
        phase = self._supervisor.snapshot().phase
        if self._requests.active is None or phase == Phase.RESTARTING.value:
            return
        if phase != Phase.RUNNING.value:
            self._told_of(self._requests.fail(f"the run is {phase}"))
            return
        request_id = self._requests.active.request_id
        self._do(self._requests.advance(self._seen(), self._clock()))
        request = self._requests.get(request_id)
        assert request is not None
        if request.status is Status.ACTIVE and request.weight_version is None:
            proved = (v for reader, v in self._proved().items() if reader.partition("/")[0] in request.engine_ids)
            request = self._requests.note(request_id, weight_version=min(proved, default=None))
        self._told_of(request)

    def _do(self, orders: list[Order]) -> None:
        try:
            for order in orders:
                match order:
                    case Add():
                        group = self._groups[order.group]
                        self._room.take(group, order.names, [view.name for view in self._views()])
                        for name in order.names:
                            self._supervisor.add_group(spec_of(self._config, group, name))
                    case Drain():
                        self._supervisor.drain_group(order.name, deadline_s=order.deadline_s, again=order.again)
                    case Stay():
                        self._supervisor.keep_group(order.name)
                    case Attach() | Detach():
                        self._calls[order.url] = asyncio.create_task(self._call(order), name=f"engine {order.url}")
                    case GiveUp():
                        self._calls[order.url].cancel()
        except RondoError as error:
            self._requests.fail(str(error))

    def _told_of(self, request: Request) -> None:
        """An event for every status of a request."""
        told, self._told = self._told, request
        if told is None or (told.request_id, told.status) != (request.request_id, request.status):
            fields = {name: getattr(request, name) for name in _TOLD}
            self._tell("scaling", {name: value for name, value in fields.items() if value != ""})
            if request.over:
                for name in request.removed_engines:  # one that was ended has left its own behind
                    for folder in ("endpoints", "agents"):
                        (self._run / folder / f"{name}.json").unlink(missing_ok=True)

    def _admit(self, group: str, num: int) -> str:
        return self._room.why_not(self._groups[group], num, {view.name: view.pids for view in self._views()})

    def _views(self) -> tuple[GroupView, ...]:
        return tuple(view for view in self._supervisor.snapshot().groups if not view.service)

    def _seen(self) -> dict[str, Replica]:
        return {
            view.name: Replica(view.state, view.incarnation, view.num_registered == view.num_ranks, bool(view.section))
            for view in self._views()
        }


def _least(config: RunConfig) -> dict[str, int]:
    """Role group -> replicas that must stay, for as many engines as the settings ask for."""
    group, sglang = config.group_of("rollout"), config.rollout.sglang
    each = 1 if sglang is None or sglang.urls else sglang.num_servers
    return {} if group is None else {group.name: max(1, -(-config.rollout.min_engines // each))}


def _most(config: RunConfig) -> dict[str, int]:
    """Role group -> replicas that there may be, of those that compute on the cores, which nobody runs out of."""
    most = {
        group.name: max(num_cores(), config.most_replicas(group)) for group in config.role_groups if not group.devices
    }
    return {name: _TIMES * num for name, num in most.items()}


def _no_engines(config: RunConfig) -> str:
    """Why no engine that runs already can be attached, empty where one can."""
    sglang = config.rollout.sglang
    if sglang is not None and sglang.router is None and config.media is None:
        return ""
    return (
        "engine_urls must be asked of a run that generates with servers (rollout.sglang), without a router and with text alone, "
        "got another one. Ask for replicas"
    )
