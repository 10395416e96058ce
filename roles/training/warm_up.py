"""Running a warm-up from an event loop: the computation on the compute thread, its figures as records.

Owns the way from the thread to the supervisor's records, how often one is written, and which demonstrations of a job these are.
Does not own the training (`sft.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rondo.models.load import load_tokenizer
from rondo.roles.config import DpoConfig, JobConfig, PairsConfig, SftConfig
from rondo.roles.data.datasets import demonstrations
from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.data.media import preparer
from rondo.roles.training.backend import Backend
from rondo.roles.training.preference import open_dpo, pair_encoder
from rondo.roles.training.reward_model import open_reward_model
from rondo.roles.training.sft import AnswerLoss, encoder, fine_tune, open_sft
from rondo.roles.training.supervised import Encode, Learning
from rondo.runtime.worker.context import WorkerContext


def train_on_demonstrations(
    open_backend: Callable[[int], Backend[AnswerLoss]],
    config: JobConfig,
    path: str,
    on_step: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
    fingerprints: Fingerprints | None = None,
) -> bool:
    """As the job asks for, with the tokenizer of the model at `path`, what `open_backend` gives for so many steps (collective).
    False on every rank when it was cut short by a rank that should stop. DataChanged for demonstrations that are not those of the
    `fingerprints`."""
    assert config.sft is not None
    rows, _ = demonstrations(config, fingerprints)
    backend = open_backend(config.sft.num_steps(len(rows)))
    return fine_tune(
        backend, load_tokenizer(path), rows, config.sft, config.demonstrated(), max_prompt_tokens=config.prompt_limit(),
        prepare=None if config.media is None else preparer(path, config.media), seed=config.seed, on_step=on_step,
        should_stop=should_stop,
    )  # fmt: skip


def open_learning(
    config: JobConfig, path: str, run_dir: Path, *, world_size: int, device: str
) -> tuple[Backend[Any], Callable[[int], Learning]]:
    """The trainer of a job without rollouts, and from a position in its rows on what it learns (collective)."""
    rows, held_out = demonstrations(config, Fingerprints.of_run(run_dir))
    source, tokenizer = config.demonstrated(), load_tokenizer(path)
    prepare = None if config.media is None else preparer(path, config.media)
    own = config.own
    encode: Encode
    if isinstance(own, SftConfig):
        backend: Backend[Any] = open_sft(config, path, config.num_steps, world_size=world_size, device=device)
        encode = encoder(tokenizer, own, source, max_prompt_tokens=config.prompt_limit(), prepare=prepare)
    else:
        assert isinstance(own, PairsConfig)
        opened = open_dpo if isinstance(own, DpoConfig) else open_reward_model
        backend = opened(config, path, config.num_steps, world_size=world_size, device=device)
        encode = pair_encoder(tokenizer, own, source, prepare=prepare)

    def learning(position: int) -> Learning:
        usable = backend.objective.known(encode) if isinstance(own, DpoConfig) else encode
        return Learning(backend, usable, rows, held_out, own, source, seed=config.seed, position=position)

    return backend, learning


async def run_warm_up(
    ctx: WorkerContext,
    config: JobConfig,
    path: str,
    open_backend: Callable[[int], Backend[AnswerLoss]],
    *,
    every: int = 1,
) -> bool:
    """As `train_on_demonstrations`, on the compute thread. A record "sft" for every so many steps, and for the last, by rank 0.
    False when it was cut short by a stop."""
    loop, figures = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

    work, last = ctx.work("warm up"), 0

    def opened(num_steps: int) -> Backend[AnswerLoss]:
        nonlocal last
        last = num_steps - 1
        return open_backend(num_steps)

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

        def train() -> bool:
            return train_on_demonstrations(opened, config, path, on_step, ctx.stopping.is_set, fingerprints)

        whole = await ctx.working("warm up", train)
        told = asyncio.create_task(figures.join())
        await asyncio.wait([told, forwarding], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
    finally:
        forwarding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await forwarding
    return whole
