"""reference and actor_fwd: one forward pass over finished samples, one column of log-probs back. One class, two weights.

Owns when a group is scored (as soon as it is put; beside a trainer in its waits, `turns.py`) and under which weights: `actor_fwd`
with the newest version it has proved, `reference` with weights that never change. Decides nothing about rows: rounds come from
the coordinator.

    round -> pack -> log-probs of the response tokens -> put column -> acknowledge
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import POLL_S, Row
from rondo.models.acceptance import accept
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.names import load_disk_tensors
from rondo.models.packing import Sequence as Packable
from rondo.models.routing import enable_replay
from rondo.roles.job import Job, follow, groups_of, open_job, timed
from rondo.roles.streams import ROUTED
from rondo.roles.training.determinism import settle
from rondo.runtime.waits import totals
from rondo.runtime.worker.context import WorkerContext

REPORT_S = 5.0
REFERENCE = "reference"
"""Folder in the run directory with the weights of version 0, where a warm-up made them; else the model's own folder."""


class Scorer:
    """A model that only scores. Runs on the compute thread."""

    def __init__(self, path: str, job: Job, *, replays: bool = False) -> None:
        """replays: the experts that rows come with."""
        config = job.config
        settle(config)
        self._model = load_model(path, dtype=config.train.dtype, device=job.device, attn=config.model.attn)
        self._packing = accept(self._model)
        if replays:
            enable_replay(self._model)
        self.version = 0
        self._device = job.device
        self._temperature = config.rollout.temperature
        self._chunk = config.train.log_prob_chunk_tokens

    def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        load_disk_tensors(self._model, tensors)
        self.version = version

    def score(self, rows: Sequence[Packable]) -> tuple[int, list[np.ndarray]]:
        """(policy version, log-probs after the temperature, float32 [R] for each row)."""
        packed = self._packing.pack(rows).to(self._device)
        with torch.inference_mode():
            flat, _ = response_log_probs(self._model, packed, temperature=self._temperature, chunk_tokens=self._chunk)
        ends = np.cumsum([row.response for row in rows])[:-1]
        return self.version, np.split(flat.float().cpu().numpy(), ends)


def media_of(row: Row) -> MediaInputs | None:
    """The media of a sample's prompt, as views into the ring that last as long as the row's."""
    return None if row.media is None else MediaInputs(row.media_key, row.media)


class _Forward:
    """The loop of both roles."""

    role: str
    replays = False
    """Whether tokens go where the engine sent them (with `train.router_replay`), or where the model's own routers do."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._reported_at = time.monotonic()

    def columns(self, version: int, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """What is put for the rows of a round."""
        raise NotImplementedError

    def _open_scorer(self, path: str, job: Job) -> Scorer:
        """On the compute thread."""
        return Scorer(path, job, replays=self.replays and job.config.train.router_replay)

    async def _score_rounds(self, job: Job, scorer: Scorer) -> None:
        await self._ctx.ready()
        async for made in timed(self._ctx, job.bus.stream(self.role, tokens=job.config.train.micro_batch_tokens)):
            rows = [
                Packable(
                    row.array("tokens"),
                    row.response,
                    media_of(row),
                    row.array(ROUTED) if ROUTED in row.columns else None,
                )
                for row in made.rows
            ]
            if rows:
                async with job.turns.scoring():
                    with self._ctx.span("forward", step=made.step, groups=groups_of(made)):
                        version, log_probs = await self._ctx.working("forward", scorer.score, rows)
                job.bus.put_columns(made, self.columns(version, log_probs))
            await job.bus.ack(made)
            self._ctx.progress()
            if self._ctx.stopping.is_set():
                return
            await self._report()

    async def _report(self) -> None:
        """How long this process has waited for what, every few seconds."""
        if time.monotonic() > self._reported_at + REPORT_S:
            self._reported_at = time.monotonic()
            await self._ctx.report("metrics", {"waits_s": totals()})


class ReferenceRole(_Forward):
    role = "reference"

    def columns(self, version: int, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {"ref_log_probs": log_probs}

    async def run(self) -> None:
        job = await open_job(self._ctx)
        path = Path(job.model_path)
        if job.config.sft is not None:  # the reference is the warmed-up policy: it exists once version 0 is committed
            await job.bus.call("await_version", 0, deadline_s=POLL_S)
            path = self._ctx.run_dir / REFERENCE
        with self._ctx.section("load", self._ctx.load_s):
            scorer = await self._ctx.compute(self._open_scorer, str(path), job)
        await self._score_rounds(job, scorer)


class ActorForwardRole(_Forward):
    role = "actor_fwd"
    replays = True

    def columns(self, version: int, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {"log_probs": log_probs, "log_probs_version": [np.array([version], np.int32)] * len(log_probs)}

    async def run(self) -> None:
        job = await open_job(self._ctx)
        with self._ctx.section("load", self._ctx.load_s):
            scorer = await self._ctx.compute(self._open_scorer, job.model_path, job)

        async def install(version: int, tensors: Mapping[str, Any]) -> None:
            await self._ctx.compute(scorer.load, version, tensors)

        async with follow(self._ctx, job, self.role, install) as first:
            await first.wait()
            await self._score_rounds(job, scorer)
