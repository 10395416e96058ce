"""New weights over several engines, so that generation never stops everywhere.

Owns the order of an update. Does not own how an engine takes weights (`installing.py`), nor its health (`fleet.py`).

    A  serving v1 | updating |  serving v2 ............      half of those that serve are being updated at a time,
    B  serving v1 ........... | updating |  serving v2       the last one that serves only when no other is about to
    C  dead ....... restarted | updating | serving v2        those that serve nothing at once, when they answer

Invariant: `update` returns when one engine at least serves the version and none serves an older one. Until then its tensors are
read, afterwards they are not. It waits for those that answer, each for as long as its own update may take, and for no other: one
that is away, that fails or that dies meanwhile is left out, and gets the newest weights when it is back. Only where no engine has
taken the weights are those that failed asked again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rondo.roles.engines.dispatch.fleet import Fleet, Member, NoEngine
from rondo.roles.engines.dispatch.installing import Installer
from rondo.runtime.errors import ConfigError, DeadlineExceeded
from rondo.runtime.waits import waiting

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Update:
    version: int
    tensors: Mapping[str, torch.Tensor]
    moved_at: float
    """When an engine began or ended its update."""


class Rolling:
    """Updates of one fleet, one after the other."""

    def __init__(self, fleet: Fleet, installer: Installer) -> None:
        self._fleet, self._installer = fleet, installer
        self._turn = asyncio.Lock()

    async def update(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigError if an engine refuses the tensors, NoEngine when none took them in time."""
        async with self._turn:
            await self._roll(_Update(version, tensors, self._fleet.clock()))

    async def _roll(self, update: _Update) -> None:
        fleet, installer = self._fleet, self._installer
        refused: list[Exception] = []
        running: dict[Member, asyncio.Task[None]] = {}

        async def one(member: Member) -> None:
            try:
                await installer.install(member, update.version, update.tensors)
            except ConfigError as error:
                refused.append(error)
            finally:
                del running[member]
                update.moved_at = fleet.clock()
                fleet.moved.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                while not refused:
                    fleet.moved.clear()
                    served = any(m.proved == update.version for m in fleet.members)
                    todo = self._todo(update, served)
                    installer.wanted = frozenset(todo)
                    if served and not todo and not running:
                        break
                    for member in self._next(todo, running):
                        update.moved_at = fleet.clock()
                        running[member] = tasks.create_task(one(member), name=f"update {member.name}")
                    if (missing := await self._wait(update, bool(running))) is not None:
                        refused.append(missing)
            if refused:
                raise refused[0]
            fleet.promised = update.version
        finally:
            installer.wanted = frozenset()
            for member in fleet.members:
                if member.proved != fleet.promised:
                    member.wake.set()
            fleet.update()

    def _todo(self, update: _Update, served: bool) -> list[Member]:
        """Engines with other weights that are waited for."""
        able = [
            m for m in self._fleet.members
            if not m.leaving and (m.alive or m.takes_weights) and m.proved != update.version
        ]  # fmt: skip
        todo = [m for m in able if not m.updates_failed]
        return todo if todo or served else able  # asked again without end, since there is nobody else

    def _next(self, todo: list[Member], running: Mapping[Member, object]) -> list[Member]:
        """Whom to begin now."""
        fleet = self._fleet
        now = fleet.clock()
        able = [m for m in todo if m.takes_weights and not m.updating and now >= m.repair_at]
        idle = [m for m in able if not fleet.serves(m)]
        serving = [m for m in able if fleet.serves(m)]
        num_serving = sum(fleet.serves(m) and not m.updating for m in fleet.members)
        if num_serving > 1:
            share = (num_serving + len(running)) * fleet.limits.updating_share
            # Rounded up where some are away, so that without one of eight there are as many waves as with it.
            away = num_serving + len(running) < len(fleet.members)
            most = max(1, math.ceil(share) if away else int(share))
            room = min(most - len(running), num_serving - 1)
            return [*idle, *serving[: max(0, room)]]
        if serving and not running and len(todo) == 1:
            return serving  # the only one: generation there goes on when its update ends
        return idle

    async def _wait(self, update: _Update, updating: bool) -> NoEngine | None:
        """Until something changes; the error when nothing did for too long."""
        fleet = self._fleet
        deadline_s = fleet.limits.absent_deadline_s
        if updating:
            num_bytes = sum(tensor.nbytes for tensor in update.tensors.values())
            deadline_s += self._installer.patience.allowed_s(num_bytes)
        peer = ", ".join(m.name for m in fleet.members if m.proved != update.version)
        try:
            left_s = update.moved_at + deadline_s - fleet.clock()
            async with waiting("update weights", peer=peer, deadline_s=left_s):
                await fleet.moved.wait()
        except DeadlineExceeded as error:
            what = f"version {update.version} must be taken by an engine within {deadline_s:g} s"
            missing = NoEngine(what, fleet.missing())
            missing.__cause__ = error
            return missing
        return None
