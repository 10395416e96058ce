"""sft: supervised fine-tuning as a job of its own (`rondo sft`), with the code that warms the actor up.

Owns reporting, and the checkpoint at the end with its Hugging Face folder. Killed, it begins again: nothing was promised yet.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rondo.roles.forward import LOAD_LIMIT_S
from rondo.roles.job import open_settings
from rondo.roles.trainer import Trainer
from rondo.runtime.checkpoints import folder_of
from rondo.runtime.context import WorkerContext


class SftRole:
    role = "sft"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        ctx = self._ctx
        config, model_path, device = open_settings(ctx)
        assert config.sft is not None
        loop, reports = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
        with ctx.section("load", LOAD_LIMIT_S):
            await ctx.compute(ctx.init_process_group, "nccl" if device != "cpu" else "gloo")
            trainer = await ctx.compute(
                Trainer, config, model_path, rank=ctx.rank, world_size=ctx.world_size, device=device
            )
        await ctx.ready()

        def on_step(metrics: dict[str, float]) -> None:
            loop.call_soon_threadsafe(reports.put_nowait, metrics)

        async def forward_reports() -> None:
            while True:
                metrics = await reports.get()
                ctx.progress()
                if ctx.rank == 0:
                    await ctx.report("sft", metrics)

        forwarding = asyncio.create_task(forward_reports())
        try:
            await ctx.compute(trainer.warm_up, on_step, ctx.stopping.is_set)
        finally:
            forwarding.cancel()
        folder = folder_of(ctx.run_dir / "checkpoints", config.sft.steps)
        with ctx.section("save", LOAD_LIMIT_S):
            await ctx.compute(trainer.save, folder, {"version": None, "index": {}}, tokenizer_path=model_path)
        if ctx.rank == 0:
            await ctx.report("checkpoint", {"path": str(folder)})
