"""Published versions for a model that is cut over the ranks of a group: what the first rank proves, all install in one turn.

Owns that all ranks compute every round under one version, and how long its slot is held. Does not own following versions
(`job.py`), the order of turns (`turn_order.py`), nor which part of a tensor is whose (`models/names.py`).

    rank 0   holds a slot, proves all of it | turn: reads its part, until all have | says that it is proved, lets go
    rank 1                                  | turn: reads its part, until all have |

Invariant: one reader of the slab stands for the group. A version that the first rank has reaches the others with the turn in
which all of them install it, whenever that is; so none is ahead of another, and each reads its own part of the slot alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from rondo.comm.weights.slab import WeightSlab
from rondo.roles.job import SLAB, Install, Job, follow
from rondo.runtime.errors import Stopping
from rondo.runtime.worker.context import WorkerContext


@asynccontextmanager
async def follow_together(
    ctx: WorkerContext, job: Job, role: str, install: Install, every: int = 1, since: int = -1
) -> AsyncIterator[asyncio.Event]:
    """As `follow`, on every rank of the group, which enter and leave together. `install` returns when all ranks have copied."""
    name = f"weights of {role}"
    if ctx.rank:
        first = asyncio.Event()
        if since >= 0:
            first.set()
        async with asyncio.TaskGroup() as tasks:  # left when the first rank has said that no more come
            tasks.create_task(_behind_the_first(ctx, job, name, install, first))
            yield first
        return
    installing = asyncio.Lock()

    @asynccontextmanager
    async def turn(held: Mapping[str, int]) -> AsyncIterator[None]:
        async with installing, job.turns.scoring(name, dict(held)):
            yield

    try:
        async with follow(ctx, job, role, install, turn, every, since) as first:
            yield first
            await installing.acquire()  # what is begun is ended on all ranks, and nothing else begins
    except* Stopping:
        await _say_the_end(job, name)
        raise
    await _say_the_end(job, name)


async def _say_the_end(job: Job, name: str) -> None:
    async with job.turns.scoring(name, None):
        pass


async def _behind_the_first(ctx: WorkerContext, job: Job, name: str, install: Install, first: asyncio.Event) -> None:
    slab: WeightSlab | None = None
    while True:
        async with job.turns.scoring(name) as held:
            if held is None:
                break
            slab = slab or WeightSlab(ctx.segments.segment(SLAB, 0), job.config.num_weight_slots)
            place = {"attempt": held["attempt"], "version": held["version"], "checksum": held["checksum"]}
            block, manifest = slab.contents(held["slot"], **place)  # whose sums the first rank has compared
            with ctx.span("load weights", beside="weights", version=held["version"]):
                await install(held["version"], manifest.views(block))
        first.set()
    if not first.is_set():
        raise Stopping("weights must be published to score with, got none any more. The run is being stopped")
