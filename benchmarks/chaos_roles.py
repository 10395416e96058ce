"""The roles, each of which has a fault in the middle of its next computation once it is signalled.

Owns where a fault strikes: on the compute thread, inside of what the supervisor sees as work; advantages computes on its event
loop, and is struck there. Everything else is the roles' own.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any

from benchmarks.chaos_faults import EAT, HANG, RAISE, strike
from rondo.roles.actor import ActorRole
from rondo.roles.advantages import AdvantagesRole
from rondo.roles.critic import CriticRole
from rondo.roles.forward import ActorForwardRole, ReferenceRole
from rondo.roles.rollout import RolloutRole
from rondo.runtime.records.timeline import Span
from rondo.runtime.worker.context import WorkerContext


class _Due:
    """The fault that a process is to have next, if any."""

    def __init__(self) -> None:
        self._number: int | None = None
        for number in (RAISE, HANG, EAT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._number = number

    def strike(self) -> None:
        if self._number is not None:
            strike(self._number)


def _fails(ctx: WorkerContext) -> WorkerContext:
    """The same context, in whose computations faults strike."""
    due, working, span = _Due(), ctx.working, ctx.span

    def planted(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(function, assigned=())
        def struck(*args: Any, **kwargs: Any) -> Any:
            due.strike()
            return function(*args, **kwargs)

        return working(name, struck, *args, **kwargs)

    def spanned(name: str, **about: Any) -> Span:
        if name == AdvantagesRole.role:
            due.strike()
        return span(name, **about)

    vars(ctx).update(working=planted, span=spanned)
    return ctx


class Rollout(RolloutRole):
    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(_fails(ctx))


class Actor(ActorRole):
    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(_fails(ctx))


class ActorForward(ActorForwardRole):
    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(_fails(ctx))


class Reference(ReferenceRole):
    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(_fails(ctx))


class Critic(CriticRole):
    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(_fails(ctx))


class Advantages(AdvantagesRole):
    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(_fails(ctx))
