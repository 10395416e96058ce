"""The coordinator: the one process that decides what happens to prompt groups.

Owns the journal (its only writer), the rings (`rings.py`: their only releaser) and everything that waits for work. It is the
shell around `index.py`: it reads doorbells and calls, turns them into events, applies them, appends them to the journal, and
only then lets their effects leave the process (answers, tails): `transitions.py`. It computes nothing on tensors and imports no
torch.

    rollout replicas -> leasing      role groups that read rows -> consuming      trainers, readers of weights -> publishing

Everything that changes state is idempotent by its own key (group and epoch, round key and rank, version, label), so a caller
that lost the connection asks again and gets the same answer. After a restart the journal is replayed, each ring is read on
from its journalled head, and deaths that happened meanwhile are fetched from the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson

from rondo.comm.bus.consuming import Consuming
from rondo.comm.bus.journal import Event
from rondo.comm.bus.leasing import Leasing
from rondo.comm.bus.publishing import Publishing
from rondo.comm.bus.transitions import MANY_FAILURES, at_once
from rondo.runtime.actors.actor import endpoint
from rondo.runtime.errors import Refused
from rondo.runtime.records.telling import telling
from rondo.runtime.waits import PROCESS

HOLD_S = 600.0
"""A call that waits is told after this time, or twice as long, that there is nothing yet (`NotYet`), and asks again."""


class Coordinator(Leasing, Consuming, Publishing):
    """Endpoints of the bus. `start()` opens what the journal says exists; `tick()` looks at deadlines."""

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open every ring that the index knows, and fold in what happened while no coordinator ran."""
        known = dict(self.index.space.rings)
        for name, space in known.items():
            self._rings.open(name, known=space)
        self._emit(*self._rings.read(known, once_more=True))
        roster = await self._supervisor.call("roster", deadline_s=30, retry=True)
        self._draining = roster["draining"]
        for member, incarnation in roster["dead"]:
            self.meeting.member_dead(member, incarnation)
            if self._is_living(member, incarnation):
                self._emit(self._death(member, incarnation))
        for member, (incarnation, *_) in list(self.index.members.items()):
            if member not in roster["groups"]:
                self._emit(self._death(member, incarnation, left=True))
        for member, life in roster["groups"].items():
            if life["alive"] and self.index.members.get(member, [None])[0] != life["incarnation"]:
                self._emit(_birth(member, life["incarnation"], life["ranks"]))
            if life["drains"]:
                self._draining_members[member] = life["incarnation"]
        now = self._clock()
        self._renewed = {group.id: now for group in self.index.groups.values() if group.state == "running"}
        self._granted = dict(self._renewed)

    def close(self) -> None:
        """Stop listening to doorbells; memory stays where it is."""
        self._rings.close()
        self._write()
        self._audit()

    def tick(self) -> None:
        """Deadlines that nobody's call would notice: leases without progress, stragglers, a step that cannot fill."""
        if not self._look_for_room():
            return
        now, events = self._clock(), []
        limit = self.config.straggler_deadline_s
        for group in self.index.running():
            if limit is not None and now - self._granted.setdefault(group.id, now) > limit:
                why = f"straggler: not finished within {limit:g} s"
                events.append(self._settle(group.id, group.epoch, "failed", why))
            elif now - self._renewed.setdefault(group.id, now) > self.config.lease_deadline_s:
                why = f"no progress for {self.config.lease_deadline_s:g} s at {group.holder}"
                events.append({"event": "lose", "group": group.id, "epoch": group.epoch, "why": why})
        if events:
            self._emit(*events)
        self._tell_of_failures()
        if not (self._draining or self.index.done):
            self._look_at_the_floor(now)
        if now - self._sent_back_at > HOLD_S:
            self._sent_back_at = now
            self._wakes.send_back()
        fatal = self.index.imbalance() or self.index.starving()
        if fatal and not self._draining:
            self._draining = True  # told once; the supervisor ends the run
            self._report("fatal", {"cause": fatal})

    def _look_at_the_floor(self, now: float) -> None:
        """While too few engines are healthy, the run waits for them by name."""
        for kind, data in self._floor.look(now):
            self._report(kind, data)
            if kind == "engines_below":
                self._below = PROCESS.begin("engines", f"rollout: {self._floor.why}", self._floor.deadline_s)
            elif self._below is not None:
                PROCESS.end(self._below)
                self._below = None

    def _tell_of_failures(self) -> None:
        """One report each time twice as many prompt groups in a row have failed."""
        num = self.index.consecutive_failed
        if num >= 2 * self._told_failures and num >= MANY_FAILURES:
            self._report("failing", {"groups": num, "error": self.index.last_error})
            self._told_failures = num
        elif num < self._told_failures:
            self._told_failures = 0

    async def ticking(self, period_s: float) -> None:
        while True:
            self.tick()
            await asyncio.sleep(period_s)

    async def reporting(self) -> None:
        """Forward reports to the supervisor, one by one; a restarted supervisor does not exist, so no retry is kept. One that
        does not arrive is lost, unless it is to end the run."""
        while True:
            kind, data = await self._reports.get()
            call = self._supervisor.call("report", "coordinator", kind, data, deadline_s=30, retry=True)
            if kind in ("fatal", "stop"):
                await call
            else:
                with telling("reports"):
                    await call

    # ---- members ----------------------------------------------------------------------------------------------------

    @endpoint
    async def member_started(self, group: str, incarnation: int, num_ranks: int) -> None:
        if self.index.members.get(group, [-1])[0] < incarnation:
            self._emit(_birth(group, incarnation, num_ranks))

    @endpoint
    async def member_dead(self, group: str, incarnation: int, left: bool = False) -> None:
        """Every process of this incarnation is gone: its puts are read once more, then its leases move on. `left`: it does not
        come back, and its rings go with the last row in them."""
        if self._is_living(group, incarnation):
            self._poll(group, once_more=True)
            self._emit(self._death(group, incarnation, left=left))
            self._floor.forget(group)
            self.meeting.member_dead(group, incarnation)
        elif left and self.index.members.get(group, [None])[0] == incarnation:  # it was dead before
            self._emit(self._death(group, incarnation, left=left))
        if left:
            self._rings.forget(f"ring/{group}/")
        if self._drains(group, incarnation):
            del self._draining_members[group]
        self._leaving.discard((group, incarnation))

    @endpoint
    async def member_drains(self, group: str, incarnation: int, stays: bool = False) -> None:
        """This member gets nothing more, and is told to end when it has done what it has; or else, where it `stays`, goes on,
        unless one of its ranks was told already that no more rounds come: it leaves then, and starts again."""
        if not stays:
            self._draining_members[group] = incarnation
        elif self._drains(group, incarnation) and (group, incarnation) not in self._leaving:
            del self._draining_members[group]
        self._wakes.wake_all()

    @endpoint
    async def meet_group(
        self, spec: dict[str, Any], member: str, incarnation: int, after: int, patience_s: float
    ) -> dict[str, Any]:
        """The next epoch of a process group across role groups (`meeting.py`)."""
        return await self.meeting.meet_group(spec, member, incarnation, after, patience_s)

    @endpoint
    async def watch_group(self, spec: dict[str, Any], number: int, lives: list[list[Any]]) -> dict[str, Any]:
        """Waits until an epoch of a process group is over."""
        return await self.meeting.watch_group(spec, number, lives)

    @endpoint
    async def open_ring(self, member: str, incarnation: int, rank: int) -> dict[str, Any]:
        """The ring of one producer; made at the first call, taken over at its head by every later incarnation."""
        self._fence(member, incarnation)
        name = f"ring/{member}/{rank}"
        rollout = self.config.generates(member)
        num_bytes = self.config.rollout_ring_bytes if rollout else self.config.column_ring_bytes
        await self._rings.make(name, num_bytes)
        self._fence(member, incarnation)
        if name not in self._rings:
            self._make_ring(name, num_bytes, member)
        self._pending.check()
        return {"ring": name, "bytes": num_bytes}

    def _death(self, member: str, incarnation: int, *, left: bool = False) -> Event:
        asked = left or self._drains(member, incarnation)
        return {
            "event": "dead", "member": member, "incarnation": incarnation,
            "publisher": member == self.config.publisher,
            **({"asked": True} if asked else {}), **({"left": True} if left else {}),
        }  # fmt: skip

    # ---- the whole --------------------------------------------------------------------------------------------------

    @at_once
    def checkpoint(self, member: str, incarnation: int, version: int) -> dict[str, Any]:
        """The whole index at `version` for a checkpoint, as JSON text: {"state": bytes}, which a call carries beside its header
        however long it is. The journal goes on in a new file that begins with it, where the disk has room for one."""
        if version != self.index.version:
            raise Refused(f"checkpoint must be of the committed version {self.index.version}, got {version}.")
        state = orjson.dumps(self._state())
        with contextlib.suppress(OSError):  # else this file goes on
            self._journal.rotate({"event": "snapshot", "state": orjson.Fragment(state)})
        return {"state": state}

    @endpoint
    async def drain(self) -> None:
        """Hand out nothing more: the run is being stopped. What is in flight may still be put and acknowledged."""
        self._draining = True
        self._wakes.wake_all()

    @endpoint
    async def stats(self) -> dict[str, Any]:
        return self.status()


def _birth(member: str, incarnation: int, num_ranks: int) -> Event:
    return {"event": "started", "member": member, "incarnation": incarnation, "ranks": num_ranks}
