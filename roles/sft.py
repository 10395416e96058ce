"""sft: supervised fine-tuning as a job of its own (`rondo sft`), with the code that warms the actor up.

Owns reporting, and the checkpoint at the end with its Hugging Face folder. Killed, it begins again: nothing was promised yet.
"""

from __future__ import annotations

import functools
from dataclasses import asdict

from rondo.models.attention import chosen
from rondo.roles.job import open_settings
from rondo.roles.training.room import save_last
from rondo.roles.training.sft import open_sft
from rondo.roles.training.warm_up import run_warm_up
from rondo.runtime.checkpoints import folder_of
from rondo.runtime.worker.context import WorkerContext


class SftRole:
    role = "sft"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        ctx = self._ctx
        config, model_path, device = open_settings(ctx)
        assert config.sft is not None
        with ctx.section("load", ctx.load_s):
            await ctx.compute(ctx.init_process_group, device)
            backend = await ctx.compute(open_sft, config, model_path, world_size=ctx.world_size, device=device)
            if ctx.rank == 0:
                await ctx.report("attention", asdict(chosen(backend.model)))
        await ctx.ready()

        with ctx.span("train"):
            if not await run_warm_up(ctx, config, model_path, lambda: backend):
                await ctx.report("unsaved", {"cause": "stopped before the last step of fine-tuning, which begins anew"})
                return
        folder = folder_of(ctx.run_dir / "checkpoints", config.sft.steps)
        save = functools.partial(backend.save, folder, {"version": None, "index": {}}, tokenizer_path=model_path)
        await save_last(ctx, config, config.sft.steps, save)
        if ctx.rank == 0:
            await ctx.report("checkpoint", {"path": str(folder)})
