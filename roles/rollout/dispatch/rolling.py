"""New weights over several engines, so that generation never stops everywhere.

Owns the order of an update and what newer weights do to it. Does not own how an engine takes weights, nor its health
(`fleet.py`).

    A  serving v1 | updating |  serving v2 ............      at most half of those that serve are being updated at a time,
    B  serving v1 ........... | updating |  serving v2       the last one that serves only when no other is about to
    C  dead ....... restarted | updating | serving v2        those that serve nothing at once, whenever they answer

Invariant: `update` returns when one engine at least serves the version and none serves an older one. Until then its tensors are
read, afterwards they are not. An engine that fails is asked again, up to `update_attempts` times, and one that takes much longer
than others did is left behind; both come back when they have been given newer weights. Newer weights supersede those that are
rolling: engines that are being updated finish, the rest go straight to the newer ones, and both updates return together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from rondo.roles.rollout.dispatch.fleet import Fleet, Member, NoEngine
from rondo.runtime.errors import ConfigError, DeadlineExceeded, PeerGone
from rondo.runtime.waits import waiting

if TYPE_CHECKING:
    import torch


class _Update:
    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version, self.tensors = version, tensors
        self.ended = asyncio.Event()
        self.withdrawn = False
        self.error: Exception | None = None
        self.moved_at = 0.0
        """When an engine began or ended its update."""


class Rolling:
    """Updates of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._newest: _Update | None = None
        self._turn = asyncio.Lock()

    async def update(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigError if an engine refuses the tensors, NoEngine when none took them in time."""
        mine = self._newest = _Update(version, tensors)
        self._fleet.moved.set()
        try:
            while True:
                async with self._turn:  # the one before ends as soon as no engine reads its tensors
                    if self._newest is mine:
                        await self._roll(mine)
                newer: _Update = self._newest
                if newer is mine:
                    return
                await newer.ended.wait()  # it waits under its own names and deadlines
                if newer.withdrawn:
                    self._newest = mine if self._newest is newer else self._newest
                elif newer.error is not None:
                    raise newer.error
                else:
                    return
        except asyncio.CancelledError:
            mine.withdrawn = True
            raise
        except Exception as error:
            mine.error = error
            raise
        finally:
            mine.ended.set()

    async def _roll(self, update: _Update) -> None:
        fleet = self._fleet
        fleet.rolling = True
        update.moved_at = fleet.clock()
        failed: list[Exception] = []
        attempts: dict[Member, int] = {}
        gone: set[Member] = set()
        running: dict[Member, asyncio.Task[None]] = {}

        async def one(member: Member) -> None:
            try:
                error = await fleet.install(member, update.version, update.tensors)
                if isinstance(error, DeadlineExceeded):
                    attempts[member] = fleet.limits.update_attempts
                elif error is not None:
                    attempts[member] = attempts.get(member, 0) + 1
                if isinstance(error, PeerGone):
                    gone.add(member)
            except ConfigError as error:
                failed.append(error)
            finally:
                del running[member]
                update.moved_at = fleet.clock()
                fleet.moved.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                while self._newest is update and not failed:
                    fleet.moved.clear()
                    served = any(m.proved == update.version for m in fleet.members)
                    wanted = [m for m in fleet.members if self._wants(m, update, gone)]
                    todo = [m for m in wanted if attempts.get(m, 0) < fleet.limits.update_attempts]
                    if not todo and not served:
                        todo = wanted  # asked again without end, since there is nobody else
                    for member in self._next(todo, running):
                        update.moved_at = fleet.clock()
                        running[member] = tasks.create_task(one(member), name=f"update {member.name}")
                    if served and all(m in running for m in todo):
                        if not running or await self._too_late(update, running):
                            break
                    elif (missing := await self._wait(update, bool(running))) is not None:
                        failed.append(missing)
            if failed:
                raise failed[0]
            if self._newest is update:
                fleet.promised = update.version
        finally:
            fleet.rolling = False
            for member in fleet.members:
                if member.proved != fleet.promised:
                    member.wake.set()
            fleet.update()

    def _wants(self, member: Member, update: _Update, gone: AbstractSet[Member]) -> bool:
        """Whether this engine has other weights, and nothing says that it is gone."""
        if member.leaving or member.proved == update.version:
            return False
        return member.alive or (member.updates_failed > 0 and member not in gone)

    def _next(self, todo: list[Member], running: Mapping[Member, object]) -> list[Member]:
        """Whom to begin now."""
        fleet = self._fleet
        now = fleet.clock()
        able = [m for m in todo if m.takes_weights and not m.updating and now >= m.repair_at]
        idle = [m for m in able if m not in fleet.routable]
        serving = [m for m in able if m in fleet.routable]
        beginning = idle
        num_routable = len(fleet.routable)
        if num_routable > 1:
            most = max(1, int((num_routable + len(running)) * fleet.limits.updating_share))
            room = min(most - len(running), num_routable - 1)
            beginning = [*idle, *serving[: max(0, room)]]
        elif serving and not running and len(todo) == 1:
            beginning = serving  # the only one: generation there goes on when its update ends
        return beginning

    async def _too_late(self, update: _Update, running: Mapping[Member, asyncio.Task[None]]) -> bool:
        """Waits for the last ones; those that take too long are left behind."""
        peer = ", ".join(member.name for member in running)
        left_s = update.moved_at + self._fleet.limits.update_grace_s - self._fleet.clock()
        try:
            async with waiting("last engines' weights", peer=peer, deadline_s=left_s):
                await self._fleet.moved.wait()
        except DeadlineExceeded:
            for task in running.values():
                task.cancel()
            return True
        return False

    async def _wait(self, update: _Update, updating: bool) -> NoEngine | None:
        """Until something changes; the error when nothing did for too long."""
        limits = self._fleet.limits
        deadline_s = limits.absent_deadline_s + (limits.update_deadline_s if updating else 0.0)
        peer = ", ".join(m.name for m in self._fleet.members if m.proved != update.version)
        try:
            left_s = update.moved_at + deadline_s - self._fleet.clock()
            async with waiting("update weights", peer=peer, deadline_s=left_s):
                await self._fleet.moved.wait()
        except DeadlineExceeded as error:
            what = f"version {update.version} must be taken by an engine within {deadline_s:g} s"
            missing = NoEngine(what, self._fleet.missing())
            missing.__cause__ = error
            return missing
        return None
