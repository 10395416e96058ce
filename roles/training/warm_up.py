"""Running a warm-up from an event loop: the computation on the compute thread, its figures as records.

Owns the way from the thread to the supervisor's records, and how often one is written. Does not own the training (`sft.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.training.backend import Trainer
from rondo.runtime.worker.context import WorkerContext


async def run_warm_up(ctx: WorkerContext, trainer: Trainer, *, every: int = 1) -> bool:
    """Trains on the job's demonstrations (collective). A record "sft" for every so many steps, and for the last, by rank 0. False
    when it was cut short by a stop."""
    assert trainer.config.sft is not None
    last = trainer.config.sft.steps - 1
    loop, figures = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

    work = ctx.work("warm up")

    def on_step(metrics: dict[str, Any]) -> None:
        ctx.progress()
        work.moved()
        if ctx.rank == 0 and (metrics["step"] % every == 0 or metrics["step"] == last):
            loop.call_soon_threadsafe(figures.put_nowait, metrics)

    async def forward() -> None:
        while True:
            await ctx.report("sft", await figures.get())
            figures.task_done()

    forwarding = asyncio.create_task(forward())
    try:
        fingerprints = Fingerprints.of_run(ctx.run_dir)
        whole = await ctx.working("warm up", trainer.warm_up, on_step, ctx.stopping.is_set, fingerprints)
        told = asyncio.create_task(figures.join())
        await asyncio.wait([told, forwarding], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
    finally:
        forwarding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await forwarding
    return whole
