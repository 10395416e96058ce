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
from rondo.models.mesh import Mesh
from rondo.models.value_head import check_scores
from rondo.roles.config import DpoConfig, JobConfig, PairsConfig, RewardModelConfig, SftConfig
from rondo.roles.data.datasets import demonstrations
from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.data.media import preparer
from rondo.roles.training.backend import Backend, make_ready, open_model
from rondo.roles.training.balance import Balance
from rondo.roles.training.determinism import seed
from rondo.roles.training.preference import PreferenceLoss, pair_encoder
from rondo.roles.training.reward_model import RewardLoss
from rondo.roles.training.sft import AnswerLoss, backend_of, encoder
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
    """`Learning.run` as the job asks for, with the tokenizer of the model at `path`, over what `open_backend` gives for so many
    steps (collective). DataChanged for demonstrations that are not those of the `fingerprints`."""
    assert config.sft is not None
    rows, _ = demonstrations(config, fingerprints)
    num_steps, source = config.sft.num_steps(len(rows)), config.demonstrated()
    backend = open_backend(num_steps)
    learning = Learning(backend, encoder_of(config, path), rows, None, config.sft, source, seed=config.seed)
    return learning.run(num_steps, on_step, should_stop)


def encoder_of(config: JobConfig, path: str) -> Encode:
    """What makes a row of a job, or of its warm-up, into what is learnt, with the tokenizer of the model at `path`."""
    own, source, tokenizer = config.shown, config.demonstrated(), load_tokenizer(path)
    prepare = None if config.media is None else preparer(path, config.media)
    if isinstance(own, PairsConfig):
        return pair_encoder(tokenizer, own, source, prepare=prepare)
    assert isinstance(own, SftConfig)
    return encoder(tokenizer, own, source, max_prompt_tokens=config.prompt_limit(), prepare=prepare)


def open_supervised(config: JobConfig, path: str, num_steps: int, *, world_size: int, device: str) -> Backend[Any]:
    """The model of a job with the weights at `path`, to learn from its rows in `num_steps` and nothing else (collective); of a
    reward model with a head, that of the folder or a new one: ConfigError for one that would be no model for sequence
    classification."""
    own, train, mesh = config.shown, config.train, Mesh.open(config.train.mesh, world_size, device)
    seed(config.seed, mesh.rank)
    scores = isinstance(own, RewardModelConfig)
    model, packing = open_model(config, path, mesh, device=device, values=scores)
    if isinstance(own, SftConfig):
        balance = Balance.of(model, train) if train.router_aux_loss_coef else None
        return backend_of(make_ready(model, train), own, num_steps, mesh=mesh, train=train, balance=balance)
    if scores:
        check_scores(model)
    assert isinstance(own, DpoConfig | RewardModelConfig)
    objective = PreferenceLoss(own, packing, device) if isinstance(own, DpoConfig) else RewardLoss(own, packing, device)
    return Backend[Any](
        make_ready(model, train), objective, own, num_steps=num_steps, mesh=mesh, offload=train.offload_optimizer,
        scales=train.dtype == "float16",
    )  # fmt: skip


def open_learning(
    config: JobConfig, path: str, run_dir: Path, *, world_size: int, device: str
) -> tuple[Backend[Any], Callable[[int], Learning]]:
    """The trainer of a job without rollouts, and from a position in its rows on what it learns (collective)."""
    rows, held_out = demonstrations(config, Fingerprints.of_run(run_dir))
    own, source, encode = config.own, config.demonstrated(), encoder_of(config, path)
    assert own is not None
    backend = open_supervised(config, path, config.num_steps, world_size=world_size, device=device)

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
