"""Roles that hold a run up, so that what a test asks of it happens at any speed: one that leaves only once it may, and one whose
engine stands in the middle of a sample until newer weights are there."""

from __future__ import annotations

import asyncio
from typing import Any

from rondo.roles.advantages import AdvantagesRole
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease, PromptGroups

GO = "may-leave"
"""A file in the run's folder."""


class HeldAdvantages(AdvantagesRole):
    async def run(self) -> None:
        await super().run()
        while not (self._ctx.run_dir / GO).exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.05)


class HeldGroups(PromptGroups):
    """Once step 0 needs nothing more of this replica, samples of later steps that have begun stand until version 1 is there, and
    go on under it."""

    engine: Any
    held = False

    async def fill(self, lease: Lease) -> None:
        self.engine._turn_s = 0.0  # a turn is one step
        steps = self.__dict__.setdefault("steps", dict[int, int]())
        steps[lease.group] = lease.step
        try:
            await super().fill(lease)
        finally:
            steps.pop(lease.group, None)

    def _stands(self, request: Request) -> bool:
        is_later = self.engine.version == 0 < min(self.__dict__["steps"].values(), default=0)
        return is_later and self.engine.progress().get(request.id, 0) > 0

    async def _generate(self, request: Request) -> Completion:
        asking = asyncio.create_task(super()._generate(request))
        try:
            while not (self.held or asking.done()):
                if self._stands(request):
                    self.held = True
                    await self._hold(request)
                await asyncio.wait([asking], timeout=0.005)
            return await asking
        finally:
            asking.cancel()

    async def _hold(self, request: Request) -> None:
        await self.engine.pause()
        try:
            while self._stands(request):  # noqa: ASYNC110 - until weights, or a lease of the first step after a death
                await asyncio.sleep(0.01)
            self.held = self.engine.version > 0
        finally:
            self.engine.resume()


class HeldRollout(RolloutRole):
    open_groups = HeldGroups
