"""reference and actor_fwd: one forward pass over finished samples, one column of log-probs back. One class, two weights.

Owns when a group is scored (as soon as it is put; beside a trainer in its waits, `compute_turns.py`) and under which weights:
`actor_fwd` with the newest version it has proved, `reference` with weights that never change. Several processes of a group that
holds the reference alone have a shard of it each, and score every round together; elsewhere each has it whole, since its
collectives could cross those of others. Decides nothing about rows: rounds come from the coordinator.

    round -> pack -> log-probs of the response tokens -> put column -> acknowledge
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import POLL_S, Row
from rondo.models.attention import chosen
from rondo.models.config import MeshConfig
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.mesh import Mesh
from rondo.models.names import load_disk_tensors
from rondo.models.packing import Sequence as Packable
from rondo.models.parallel import compute_in
from rondo.models.routing import enable_replay
from rondo.roles.job import Job, follow, groups_of, open_job, timed
from rondo.roles.streams import ROUTED
from rondo.roles.training.backend import open_model
from rondo.runtime.waits import totals
from rondo.runtime.worker.context import WorkerContext

REPORT_S = 5.0
REFERENCE = "reference"
"""Folder in the run directory with the weights of version 0, where a warm-up made them; else the model's own folder."""


class Scorer:
    """A model that only scores, cut over `mesh` (collective). Runs on the compute thread."""

    def __init__(self, path: str, job: Job, *, mesh: Mesh = Mesh(), replays: bool = False) -> None:  # noqa: B008  # frozen
        """replays: the experts that rows come with."""
        config = job.config
        self._model, self._packing = open_model(config, path, mesh, device=job.device, dtype=config.train.dtype)
        if replays:
            enable_replay(self._model)
        compute_in(self._model, config.train.dtype)
        self.version = 0
        self.mesh = mesh
        self.attention = chosen(self._model)
        self._device = job.device
        self._temperature = config.rollout.temperature
        self._chunk = config.train.log_prob_chunk_tokens

    def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        load_disk_tensors(self._model, tensors)
        self.version = version

    def score(self, rows: Sequence[Packable]) -> tuple[int, list[np.ndarray]]:
        """(policy version, log-probs after the temperature, float32 [R] for each row). No rows: of several ranks, a dummy through
        the same modules."""
        if not rows and self.mesh.size == 1:
            return self.version, []
        packed = self._packing.pack(rows or [Packable(np.zeros(2, np.int32), 1)]).to(self._device)
        with torch.no_grad():
            flat, _ = response_log_probs(self._model, packed, temperature=self._temperature, chunk_tokens=self._chunk)
        ends = np.cumsum([row.response for row in rows])
        return self.version, np.split(flat.float().cpu().numpy(), ends)[: len(rows)]


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

    def _open_scorer(self, path: str, job: Job, *, sharded: bool = False) -> Scorer:
        """On the compute thread. sharded: over the processes of the group (collective)."""
        mesh = Mesh()
        if sharded:
            self._ctx.init_process_group(job.device)
            mesh = Mesh.open(MeshConfig(), self._ctx.world_size, job.device)
        return Scorer(path, job, mesh=mesh, replays=self.replays and job.config.train.router_replay)

    async def _score_rounds(self, job: Job, scorer: Scorer) -> None:
        if self._ctx.rank == 0:
            await self._ctx.report("attention", asdict(scorer.attention))
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
            if rows or scorer.mesh.size > 1:
                async with job.turns.scoring():
                    with self._ctx.span("forward", step=made.step, groups=groups_of(made)):
                        version, log_probs = await self._ctx.working("forward", scorer.score, rows)
            if rows:
                job.bus.put_columns(made, self.columns(version, log_probs))
            await job.bus.ack(made)
            self._ctx.progress()
            stops = self._ctx.stopping.is_set()
            if scorer.mesh.size > 1:  # a rank that left alone would hang the others in their next round
                stops = await self._ctx.compute(scorer.mesh.any, stops)
            if stops:
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
            sharded = self._ctx.world_size > 1 and job.is_alone
            scorer = await self._ctx.compute(functools.partial(self._open_scorer, str(path), job, sharded=sharded))
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
