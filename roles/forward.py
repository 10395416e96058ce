"""reference and actor_fwd: one forward pass over finished samples, one column of log-probs back. One class, two weights.

Owns when a group is scored (as soon as it is put) and under which weights: `actor_fwd` with the newest version it has proved,
`reference` with weights that never change. Decides nothing about rows: rounds come from the coordinator.

    round -> pack -> log-probs of the response tokens -> put column -> acknowledge
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.comm.bus import POLL_S
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.names import load_disk_tensors
from rondo.models.packing import Sequence as Packable
from rondo.models.packing import can_share_rows, pack
from rondo.roles.job import Job, follow, open_job
from rondo.runtime.context import WorkerContext
from rondo.runtime.waits import totals

LOAD_LIMIT_S = 1800.0
REPORT_S = 5.0
REFERENCE = "reference"
"""Folder in the run directory with the weights of version 0, where a warm-up made them; else the model's own folder."""


class Scorer:
    """A model that only scores. Runs on the compute thread."""

    def __init__(self, path: str, job: Job) -> None:
        config = job.config
        self._model = load_model(path, dtype=config.train.dtype, device=job.device, attn=config.model.attn)
        self._share_rows = can_share_rows(self._model)
        self._device = job.device
        self._temperature = config.rollout.temperature
        self._chunk = config.train.log_prob_chunk_tokens

    def load(self, tensors: Mapping[str, Any]) -> None:
        load_disk_tensors(self._model, tensors)

    def score(self, rows: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        """rows: (tokens int32 [T], response length R) each. float32 [R] each, log-probs after the temperature."""
        sequences = [Packable(tokens, response) for tokens, response in rows]
        packed = pack(sequences, share_rows=self._share_rows).to(self._device)
        with torch.inference_mode():
            flat, _ = response_log_probs(self._model, packed, temperature=self._temperature, chunk_tokens=self._chunk)
        ends = np.cumsum([response for _, response in rows])[:-1]
        return np.split(flat.float().cpu().numpy(), ends)


class _Forward:
    """The loop of both roles."""

    role: str
    column: str

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._reported_at = time.monotonic()

    async def _score_rounds(self, job: Job, scorer: Scorer) -> None:
        await self._ctx.ready()
        async for made in job.bus.stream(self.role, tokens=job.config.train.micro_batch_tokens):
            rows = [(row.array("tokens"), row.response) for row in made.rows]
            if rows:
                log_probs = await self._ctx.compute(scorer.score, rows)
                job.bus.put_columns(made, {self.column: log_probs})
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
    column = "ref_log_probs"

    async def run(self) -> None:
        job = await open_job(self._ctx)
        path = Path(job.model_path)
        if job.config.sft is not None:  # the reference is the warmed-up policy: it exists once version 0 is committed
            await job.bus.call("await_version", 0, deadline_s=POLL_S)
            path = self._ctx.run_dir / REFERENCE
        with self._ctx.section("load", LOAD_LIMIT_S):
            scorer = await self._ctx.compute(Scorer, str(path), job)
        await self._score_rounds(job, scorer)


class ActorForwardRole(_Forward):
    role = "actor_fwd"
    column = "log_probs"

    async def run(self) -> None:
        job = await open_job(self._ctx)
        with self._ctx.section("load", LOAD_LIMIT_S):
            scorer = await self._ctx.compute(Scorer, job.model_path, job)

        async def install(version: int, tensors: Mapping[str, Any]) -> None:
            await self._ctx.compute(scorer.load, tensors)

        async with follow(self._ctx, job, self.role, install) as first:
            await first.wait()
            await self._score_rounds(job, scorer)
