"""Requests: which replicas come and leave for a wish, in which order, and what follows when one does not come up, is late, or
somebody changes his mind. A pure state machine: wishes and what is seen go in, with the time; what is to be done comes out.

Owns the decisions and the numbers of replicas, none of which is given twice. Does not own processes, leases or memory: whoever
drains, ends what it has or is ended at its deadline, and then what it had goes to others (`machine.py`, `coordinator.py`).

    requests.ask(Wish("rollout", "scale_out", 3), seen, now)  ->  Request(PENDING)
    requests.advance(seen, now)                               ->  [Add("rollout", ("rollout-1", "rollout-2"))]

Invariants: one request is under way at a time; the same total, or the same key, changes nothing a second time; the newest
replicas leave first, and one stays; whatever a cancelled or failed request has begun is undone before it says so.
"""

from __future__ import annotations

import math
import re
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from rondo.launch.elastic.joining import Call, Joining
from rondo.launch.elastic.request import Replica, Request, Status, Wish
from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.orders import State

Seen = Mapping[str, Replica]
"""The replicas of all role groups, by name."""

_KEPT = 100


@dataclass(frozen=True, slots=True)
class Add:
    """New replicas of a role group start."""

    group: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica ends what it has and leaves, within `deadline_s`: for good, or to start `again`."""

    name: str
    deadline_s: float
    again: bool = False


@dataclass(frozen=True, slots=True)
class Stay:
    """A replica that was to leave stays, or comes back."""

    name: str


Order = Add | Drain | Stay | Call


@dataclass(slots=True)
class _Work:
    """The request under way. `names`: the replicas that it is about, and are not done with; `then`: what it ends as, when those
    of `names` are gone that leave, and those are up that come."""

    id: str
    group: str
    deadline: float = math.inf
    names: tuple[str, ...] = ()
    then: Status | None = None
    coming: bool = False
    loaded: frozenset[str] = frozenset()
    up: frozenset[str] = frozenset()
    left_at: int = 0
    """Of a restart: the incarnation of the replica whose turn it is."""
    joining: Joining | None = None
    """Of a request about engines that run already."""


class Requests:
    """`groups`: role -> its role group, of every role that can have more or fewer replicas; `fixed`: of the others, which only
    start again; `replicas`: role group -> how many it has at the start; `least`: how many must stay, where that is more than one;
    `most`: how many there may be, where something limits that.
    `admit`: why so many more of a role group are not possible, empty where they are; `no_engines`: why none that run already are
    attached; `failure`: what a replica failed of last. `drain_s` and `start_s`: timeouts where a wish has none."""

    def __init__(
        self,
        groups: Mapping[str, str],
        replicas: Mapping[str, int],
        admit: Callable[[str, int], str],
        *,
        drain_s: float,
        start_s: float,
        wall: Callable[[], float],
        least: Mapping[str, int] = MappingProxyType({}),
        most: Mapping[str, int] = MappingProxyType({}),
        no_engines: str = "",
        failure: Callable[[str], str] = lambda name: "",
        fixed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._groups, self._fixed = groups, fixed
        self._next = dict(replicas)
        self._admit = admit
        self._default_s = {"scale_out": start_s, "scale_in": drain_s, "restart": drain_s + start_s}
        self._drain_s, self._failure, self._no_engines = drain_s, failure, no_engines
        self._least, self._most = least, most
        self.attached: dict[str, str] = {}
        """Engines that run already and were attached: address -> replica."""
        self._wall = wall
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._by_key: dict[str, tuple[Wish, str]] = {}
        self._work: _Work | None = None

    # ---- questions --------------------------------------------------------------------------------------------------

    @property
    def roles(self) -> Mapping[str, str]:
        """Role -> role group, of those whose number may change."""
        return self._groups

    def most(self, role: str) -> int | None:
        """Replicas that a role may have; None where its number is fixed, or what they need limits it."""
        return self._most.get(self._groups.get(role, ""))

    @property
    def active(self) -> Request | None:
        """The one under way."""
        return None if self._work is None else self._requests[self._work.id]

    def all(self) -> tuple[Request, ...]:
        """Those that began, the newest first, as many as are kept."""
        return tuple(reversed(self._requests.values()))

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    # ---- wishes -----------------------------------------------------------------------------------------------------

    def ask(self, wish: Wish, seen: Seen, now: float) -> Request:
        """The request of a wish: PENDING, or an answer that changes nothing. ConfigError for a wish that can be none."""
        groups, which = self._groups, "that keeps no state and shares no process with the trainer"
        if wish.action == "restart":
            groups, which = {**self._groups, **self._fixed}, "of this run"
        if wish.role not in groups:
            known = ", ".join(groups) or "none of this run"
            raise ConfigError(
                f"role must be one {which} ({known}), got {wish.role!r}. Name another one, or give it a role group of its own"
            )
        if wish.idempotency_key is not None and wish.idempotency_key in self._by_key:
            before, request_id = self._by_key[wish.idempotency_key]
            if before != wish:
                raise ConfigError(
                    f"idempotency_key must be new for another wish, got {wish.idempotency_key!r} of {before}. Take another key"
                )
            return self._requests[request_id]
        group = groups[wish.role]
        living = replicas_of(group, seen)
        if self.active is not None:
            status, message = Status.CONFLICT, f"request {self.active.request_id} is under way"
        else:
            status, message = self._judge(wish, group, living)
        request = replace(self._answer(wish, living, begins=status is Status.PENDING), status=status, message=message)
        if status is Status.PENDING and not wish.dry_run:
            self._begin(wish, request, group, now)
        return request

    def _judge(self, wish: Wish, group: str, living: Sequence[str]) -> tuple[Status, str]:
        if wish.action == "restart":
            return Status.PENDING, f"{len(living)} replicas, one after another"
        if wish.engine_urls:
            return self._judge_engines(wish)
        target, num = wish.num_replicas, len(living)
        least = self._least.get(group, 1)
        if target < least:
            advice = "Lower rollout.min_engines, or stop" if least > 1 else "Stop"
            return Status.REJECTED, f"num_replicas must be at least {least}, got {target}. {advice} the run to end all"
        if (most := self.most(wish.role)) is not None and target > most:
            why = f"num_replicas of {wish.role} must be at most {most} on this machine, got {target}"
            return Status.REJECTED, f"{why}. Ask for fewer, or start the run with more role_groups[{group}].replicas"
        if target == num:
            return Status.NOOP, f"there are {num} replicas already"
        if (target > num) != (wish.action == "scale_out"):
            other = "scale_in" if wish.action == "scale_out" else "scale_out"
            return (
                Status.REJECTED,
                f"num_replicas of {wish.action} must lead from {num} there, got {target}. Use {other}",
            )
        why_not = self._admit(group, target - num) if target > num else ""
        return (Status.REJECTED, why_not) if why_not else (Status.PENDING, f"from {num} to {target} replicas")

    def _judge_engines(self, wish: Wish) -> tuple[Status, str]:
        if wish.role != "rollout" or wish.num_replicas:
            return (
                Status.REJECTED,
                "engine_urls must come for rollout, without num_replicas, got others. Ask one after the other",
            )
        if self._no_engines:
            return Status.REJECTED, self._no_engines
        comes = wish.action == "scale_out"
        num = sum((url in self.attached) != comes for url in wish.engine_urls)
        where = "attached" if comes else "detached"
        return (
            (Status.PENDING, f"{num} engines to be {where}")
            if num
            else (Status.NOOP, f"all of them are {where} already")
        )

    def _answer(self, wish: Wish, living: Sequence[str], *, begins: bool) -> Request:
        """With the replicas that it would take; new ones where it `begins` alone, since any number may be asked for."""
        at = self._wall()
        chosen: Sequence[str] = living
        if wish.engine_urls:
            chosen = wish.engine_urls
        elif wish.action == "scale_out":
            chosen = self._names(self._groups[wish.role], wish.num_replicas - len(living)) if begins else ()
        elif wish.action == "scale_in":
            chosen = living[::-1][: max(0, len(living) - wish.num_replicas)]  # the newest first
        told = {
            "num_replicas": wish.num_replicas if wish.action != "restart" else len(living),
            "timeout_s": wish.timeout_s if wish.timeout_s is not None else self._default_s[wish.action],
        }
        return Request(
            **asdict(wish) | told, request_id=uuid.uuid4().hex[:12], status=Status.PENDING, selected_engines=tuple(chosen),
            created_at=at, updated_at=at,
        )  # fmt: skip

    def _names(self, group: str, num: int) -> tuple[str, ...]:
        return tuple(f"{group}-{self._next[group] + i}" for i in range(num))

    def _begin(self, wish: Wish, request: Request, group: str, now: float) -> None:
        self._requests[request.request_id] = request
        while len(self._requests) > _KEPT:
            gone, _ = self._requests.popitem(last=False)
            self._by_key = {key: kept for key, kept in self._by_key.items() if kept[1] != gone}
        if wish.idempotency_key is not None:
            self._by_key[wish.idempotency_key] = wish, request.request_id
        self._work = _Work(request.request_id, group, deadline=now + request.timeout_s)

    def cancel(self, request_id: str, seen: Seen, now: float) -> tuple[Request, list[Order]]:
        """Undo what the request under way has done. ConfigError for one that is over, or unknown."""
        found = self._requests.get(request_id)
        if found is None or self._work is None or self._work.id != request_id:
            got = "none of that name" if found is None else f"one that is {found.status}"
            raise ConfigError(
                f"request {request_id} must be under way to be cancelled, got {got}. Ask for another number"
            )
        work = self._work
        if work.then is not None:  # it is being undone already
            return found, []
        work.then = Status.CANCELLED
        if found.status is Status.PENDING:
            work.names = ()
            return self._end(Status.CANCELLED), []
        if found.action == "scale_out" and work.joining is None:
            return self._set(Status.REMOVING), self._undo(work.names, seen, now)
        if work.joining is not None:
            return self._set(Status.REMOVING), list(work.joining.cancel())
        # Who is there stays; who has left comes back as another one.
        orders: list[Order] = [Stay(name) for name in work.names if name in seen]
        missing = [name for name in found.selected_engines if name not in seen] if found.action == "scale_in" else []
        work.names = tuple(name for name in work.names if name in seen)
        if missing:
            names = self._take(work.group, len(missing))
            orders.append(Add(work.group, names))
            work.names += names
        work.coming, work.deadline = True, now + self._default_s["scale_out"]
        return self._set(Status.CREATING), orders

    def fail(self, why: str) -> Request:
        """What was to be done could not be."""
        return self._end(Status.FAILED, why)

    def note(self, request_id: str, *, weight_version: int | None) -> Request:
        """What its new replicas have proved."""
        self._requests[request_id] = replace(self._requests[request_id], weight_version=weight_version)
        return self._requests[request_id]

    # ---- on the way -------------------------------------------------------------------------------------------------

    def advance(self, seen: Seen, now: float) -> list[Order]:
        """What is to be done next for the request under way."""
        work, request = self._work, self.active
        if work is None or request is None:
            return []
        if request.status is Status.PENDING:
            return self._start(work, request, seen, now)
        if work.joining is not None:
            return self._joins(work.joining)
        if request.action == "restart":
            return self._restarts(work, request, seen, now)
        if work.coming:
            return self._comes(work, request, seen, now)
        return self._goes(work, request, seen, now)

    def _start(self, work: _Work, request: Request, seen: Seen, now: float) -> list[Order]:
        living = replicas_of(work.group, seen)
        if request.engine_urls:
            work.joining = Joining(request, living[0] if living else "", self.attached, self._drain_s)
            comes = request.action == "scale_out"
            self._set(Status.CONNECTING if comes else Status.DRAINING, selected_engines=work.joining.urls)
            return list(work.joining.begin())
        if request.action == "restart":
            work.names = tuple(living)
            self._set(Status.DRAINING, selected_engines=work.names)
            return self._next_turn(work, request, seen)
        if request.action == "scale_out":
            work.names, work.coming = self._take(work.group, request.num_replicas - len(living)), True
            self._set(Status.CREATING, selected_engines=work.names)
            return [Add(work.group, work.names)]
        work.names, work.then = tuple(living[::-1][: len(living) - request.num_replicas]), None
        self._set(Status.DRAINING, selected_engines=work.names)
        return [Drain(name, 0.0 if request.force else request.timeout_s) for name in work.names]

    def told(self, url: str, why: str = "") -> None:
        """The call about an engine has ended; `why` it failed."""
        if self._work is not None and self._work.joining is not None:
            self._work.joining.told(url, why)

    def _joins(self, joining: Joining) -> list[Order]:
        ended, calls = joining.advance()
        request = self.active
        assert request is not None
        field = "engine_ids" if request.action == "scale_out" else "removed_engines"
        self._set(
            Status.REMOVING if calls else request.status, failed_engines=dict(joining.failed), **{field: joining.done}
        )
        if ended is Status.ACTIVE:
            self._set(Status.READY)
        if ended is not None:
            self._end(ended, f"{len(joining.failed)} of {len(joining.urls)} engines failed" if joining.failed else "")
        return list(calls)

    def _take(self, group: str, num: int) -> tuple[str, ...]:
        names = self._names(group, num)
        self._next[group] += num
        return names

    def _comes(self, work: _Work, request: Request, seen: Seen, now: float) -> list[Order]:
        """New replicas come up, or those that were to leave come back."""
        work.up |= {name for name in work.names if name in seen and seen[name].serves}
        late = now >= work.deadline
        failed = dict(request.failed_engines)
        orders: list[Order] = []
        for name in work.names:
            if name in work.up or name in failed:
                continue
            if name not in seen:
                failed[name] = self._failure(name) or "it did not come up"
            elif late:
                failed[name] = f"not up within {request.timeout_s:g} s"
                orders += [Drain(name, 0.0)] if work.then is None else []
        up = tuple(name for name in work.names if name in work.up)
        self._set(request.status, failed_engines=failed, engine_ids=up)
        if len(up) + len(failed) < len(work.names):
            self._set(self._stage(work, request, seen))
            return orders
        if work.then is not None:  # all are back that can be
            self._end(work.then, "; ".join(f"{name}: {why}" for name, why in failed.items()))
            return orders
        if not failed:
            self._set(Status.READY)
            self._end(Status.ACTIVE)
            return orders
        keeps = request.policy == "keep_partial" and bool(up)
        work.then = Status.PARTIAL if keeps else Status.FAILED
        why = f"{len(failed)} of {len(work.names)} new replicas did not come up"
        self._set(Status.REMOVING, error_message=why)
        if keeps:
            work.names, work.coming = tuple(failed), False
            return orders
        return orders + self._undo(up, seen, now)

    def _stage(self, work: _Work, request: Request, seen: Seen) -> Status:
        """How far the one is that is least far. Loading has several sections, between which none goes back."""
        coming = [name for name in work.names if name not in work.up and name in seen]
        if any(not seen[name].registered or seen[name].state is State.ENDING for name in coming):
            return Status.CREATING
        work.loaded |= {name for name in coming if seen[name].loads}
        far = request.status is Status.WEIGHT_SYNCING
        if far or all(name in work.loaded and not seen[name].loads for name in coming):
            return Status.WEIGHT_SYNCING
        return Status.HEALTH_CHECKING

    def _undo(self, names: Sequence[str], seen: Seen, now: float) -> list[Order]:
        """Replicas that came leave again."""
        work = self._work
        assert work is not None
        work.coming = False
        return [Drain(name, self._drain_s if seen[name].serves else 0.0) for name in names if name in seen]

    def _goes(self, work: _Work, request: Request, seen: Seen, now: float) -> list[Order]:
        """Replicas leave."""
        left = [name for name in work.names if name in seen]
        removed = tuple(name for name in work.names if name not in seen and name not in request.failed_engines)
        if removed != request.removed_engines:
            self._set(request.status, removed_engines=removed)
        if not left:
            self._end(work.then or Status.COMPLETED)
        elif request.status is Status.DRAINING and all(seen[name].state is State.ENDING for name in left):
            self._set(Status.REMOVING)
        return []

    # ---- restarts ---------------------------------------------------------------------------------------------------

    def _next_turn(self, work: _Work, request: Request, seen: Seen) -> list[Order]:
        name = work.names[0]
        found = seen.get(name)
        if found is None:
            return []
        work.left_at = found.incarnation - (found.state is State.STARTING)  # one that starts is a new one already
        return [Drain(name, 0.0 if request.force else self._drain_s, again=True)]

    def _restarts(self, work: _Work, request: Request, seen: Seen, now: float) -> list[Order]:
        name = work.names[0]
        found = seen.get(name)
        if work.then is not None:
            if found is None or found.serves or now >= work.deadline:
                self._end(work.then)
            return []
        if found is None or now >= work.deadline:
            why = "is not there any more" if found is None else f"was not back within {request.timeout_s:g} s"
            self._end(Status.FAILED, f"{name} {why}; {len(work.names) - 1} replicas after it are as they were")
            return []
        if found.incarnation == work.left_at:
            return []
        if not found.serves:
            self._set(Status.CREATING)
            return []
        work.names = work.names[1:]
        request = self._set(Status.DRAINING, engine_ids=(*request.engine_ids, name))
        if not work.names:
            self._end(Status.COMPLETED)
            return []
        work.deadline = now + request.timeout_s
        return self._next_turn(work, request, seen)

    # ---- records ----------------------------------------------------------------------------------------------------

    def _set(self, status: Status, **changes: object) -> Request:
        work = self._work
        assert work is not None
        before = self._requests[work.id]
        changed = replace(before, status=status, **changes)  # type: ignore[arg-type]
        if changed != before:
            self._requests[work.id] = replace(changed, updated_at=self._wall())
        return self._requests[work.id]

    def _end(self, status: Status, why: str = "") -> Request:
        request = self._set(status, **({"error_message": why} if why else {}))
        self._work = None
        return request


def replicas_of(group: str, seen: Seen) -> list[str]:
    """The replicas of a role group, in the order of their numbers."""
    found = [name for name in seen if re.fullmatch(rf"{re.escape(group)}-\d+", name)]
    return sorted(found, key=lambda name: int(name.rpartition("-")[2]))
