"""A role that leaves a run only once it may, so that its stop lasts as long as a test wants it to."""

from __future__ import annotations

import asyncio

from rondo.roles.advantages import AdvantagesRole

GO = "may-leave"
"""A file in the run's folder."""


class HeldAdvantages(AdvantagesRole):
    async def run(self) -> None:
        await super().run()
        while not (self._ctx.run_dir / GO).exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.05)
