"""genrm: the judge's own process: it serves a model whose weights never change, for rewards to ask.

Owns which engine that is, and how long it, or a scorer (`scorer.py`), is there. Does not own what a judge is asked, or what
becomes of the answers (`rewards/genrm.py`): whoever asks finds its address in a record of the run directory, and speaks HTTP with
it, as with a judge that somebody else runs.

    load -> listen, record genrm/GROUP.json -> answer ... until the run is over or this replica leaves: what is in flight

Invariant: it keeps nothing between two answers, so one that dies costs what was being asked of it, which is asked again.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any

from rondo.comm.bus.bus import POLL_S
from rondo.comm.bus.group import NEVER
from rondo.models.load import end_ids, load_model, load_tokenizer, num_tokens
from rondo.roles.config import EndpointConfig
from rondo.roles.config.genrm import GenrmConfig
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.sglang.server import Launch, SGLangServer, answers, first_of
from rondo.roles.forward import REPORT_S
from rondo.roles.job import Job, open_job
from rondo.roles.serve.app import DRAIN_S
from rondo.roles.serve.endpoint import announced, endpoint
from rondo.roles.training.determinism import settle
from rondo.runtime.errors import WorkerDied
from rondo.runtime.waits import totals
from rondo.runtime.worker.context import WorkerContext

_LOOK_S = 5.0

Watching = Callable[[], Awaitable[None]]
"""Ends where what is served does."""


async def there(ctx: WorkerContext, job: Job, role: str, serving: AbstractAsyncContextManager[Watching]) -> None:
    """Serves until the run is over, or this replica leaves."""
    async with serving as watching:
        await ctx.ready()
        over = job.bus.call("weights", f"{role}.{ctx.rank}", NEVER, deadline_s=POLL_S)
        await first_of((over, ctx.stopping.wait(), watching()))


class GenrmRole:
    role = "genrm"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        job = await open_job(self._ctx)
        config = job.config.genrm
        assert config is not None and config.model is not None
        serving = self._own_engine if config.sglang is None else self._server
        await there(self._ctx, job, self.role, serving(job, config))

    @asynccontextmanager
    async def _own_engine(self, job: Job, config: GenrmConfig) -> AsyncIterator[Watching]:
        """The embedded engine in this process; what it yields reports of it."""
        ctx, path = self._ctx, job.judge_paths[self.role]
        with ctx.section("load", ctx.load_s):
            slots, tokenizer = await ctx.compute(self._build, job, config)
        engine = EmbeddedEngine(slots, functools.partial(ctx.working, "judge"))

        async def report() -> None:
            made = 0
            while True:
                await asyncio.sleep(REPORT_S)
                stats = engine.stats()
                if stats.tokens_generated != made:
                    made = stats.tokens_generated
                    ctx.progress()
                await ctx.report("metrics", {"engine": asdict(stats), "waits_s": totals(), "rank": ctx.rank})

        try:
            async with endpoint(
                ctx, EndpointConfig(), engine, tokenizer, model_name=self.role, model_path=path,
                max_length=config.max_prompt_tokens + config.max_new_tokens, stop_token_ids=end_ids(path, tokenizer),
                seeds=True, folder=self.role, drain_s=DRAIN_S,
            ):  # fmt: skip
                yield report
        finally:
            await engine.close()

    def _build(self, job: Job, config: GenrmConfig) -> tuple[SlotEngine, Any]:
        """Load the engine and the tokenizer."""
        assert config.model is not None
        settle(job.config)
        path = job.judge_paths[self.role]
        tokenizer = load_tokenizer(path, needs_chat_template=True)
        model = load_model(path, dtype=config.model.dtype, device=job.device, attn=config.model.attn)
        length = config.max_prompt_tokens + config.max_new_tokens
        slots = slot_engine(
            model, num_slots=config.num_slots, max_length=length, fixed_shapes=job.config.deterministic,
            num_tokens=num_tokens(tokenizer),
        )  # fmt: skip
        return slots, tokenizer

    @asynccontextmanager
    async def _server(self, job: Job, config: GenrmConfig) -> AsyncIterator[Watching]:
        """A server of SGLang that this process starts; what it yields ends where the server does, or answers nothing."""
        ctx, settings = self._ctx, config.sglang
        assert settings is not None
        name = f"{ctx.group}.{ctx.rank}"
        server = SGLangServer(
            self._launch(job, config),
            log=ctx.run_dir / "logs" / f"attempt_{ctx.attempt}" / f"{name}.{ctx.incarnation}.sglang.log",
            folder=ctx.rt_dir,
            name=f"{name}.{ctx.incarnation}.sglang",
        )
        try:
            with ctx.section("load", ctx.load_s + settings.start_deadline_s):
                client = await server.start(settings.start_deadline_s)
            key = ctx.rt_dir / f"{name}.key"
            with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(server.key)

            async def silent() -> str:
                heard = time.monotonic()
                while (unheard_s := time.monotonic() - heard) < settings.silent_deadline_s:
                    if await answers(client):
                        heard = time.monotonic()
                    await asyncio.sleep(_LOOK_S)
                return f"it answered nothing for {unheard_s:.0f} s"

            async def watch() -> None:
                why = await first_of([server.gone(), silent()])
                raise WorkerDied(f"the judge's server must go on, got: {why}. Read {server.log}")

            async with client, announced(ctx, ctx.run_dir / self.role / f"{name}.json", client.url, key, self.role):
                yield watch
        finally:
            await server.close()

    def _launch(self, job: Job, config: GenrmConfig) -> Launch:
        settings, device = config.sglang, job.device
        assert settings is not None and settings.python is not None and config.model is not None
        length = config.max_prompt_tokens + config.max_new_tokens
        return Launch(
            settings.python,
            job.judge_paths[self.role],
            dtype=config.model.dtype,
            first_device=int(device.removeprefix("cuda:")) if device.startswith("cuda:") else None,
            tensor_parallel=settings.tensor_parallel,
            max_running=config.num_slots,
            max_tokens=config.num_slots * length,
            arguments={"context-length": length, **settings.arguments},
            environment=settings.environment,
        )
