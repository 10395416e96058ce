"""reference and actor_fwd: one forward pass over finished samples, one column of log-probs back. One class, two weights.

Owns when a group is scored (as soon as it is put; beside a trainer in its waits, `compute_turns.py`) and under which weights:
`actor_fwd` with the newest version it has proved, which is no older than any that a row was sampled under; `reference` with
weights that never change. The processes of a group have a shard of the model each, and score every round together, under one
version (`group_versions.py`). Decides nothing about rows: rounds come from the coordinator.

    round -> pack -> log-probs of the response tokens -> put column -> acknowledge
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import POLL_S, Round, Row
from rondo.comm.bus.group import NO_VERSION
from rondo.models.attention import chosen
from rondo.models.config import MeshConfig
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.mesh import Mesh
from rondo.models.names import load_disk_tensors
from rondo.models.packing import Sequence as Packable
from rondo.models.parallel import compute_in
from rondo.models.routing import enable_replay
from rondo.roles.job import Job, groups_of, open_job, timed
from rondo.roles.streams import ROUTED
from rondo.roles.training.backend import open_model
from rondo.roles.training.group_versions import follow_together
from rondo.runtime.waits import totals, waiting
from rondo.runtime.worker.context import WorkerContext

REPORT_S = 5.0
REFERENCE = "reference"
"""Folder in the run directory with the weights of version 0, where a warm-up made them; else the model's own folder."""


@dataclass(frozen=True, slots=True)
class Scored:
    """`log_probs` after the temperature, float32 [R] for each row, under policy version `version`; None where that is older than
    what a rank asked for. `stops`: a rank leaves behind this round, so all do."""

    version: int
    log_probs: list[np.ndarray] | None
    stops: bool = False


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
        """This rank's part of `tensors` (disk names), which may go when it returns: all ranks have theirs (collective)."""
        load_disk_tensors(self._model, tensors)
        self.mesh.most(version)
        self.version = version

    def score(self, rows: Sequence[Packable], *, needs: int = NO_VERSION, stops: bool = False) -> Scored:
        """The rows of this rank (collective). No rows: of several ranks, a dummy through the same modules. needs: the oldest
        version that will do for them; stops: this rank leaves behind this round."""
        needs, stopping = self.mesh.most(needs, stops)
        if needs > self.version:
            return Scored(self.version, None, bool(stopping))
        if not rows and self.mesh.size == 1:
            return Scored(self.version, [], bool(stopping))
        packed = self._packing.pack(rows or [Packable(np.zeros(2, np.int32), 1)]).to(self._device)
        with torch.no_grad():
            flat, _ = response_log_probs(self._model, packed, temperature=self._temperature, chunk_tokens=self._chunk)
        ends = np.cumsum([row.response for row in rows])
        return Scored(self.version, np.split(flat.float().cpu().numpy(), ends)[: len(rows)], bool(stopping))


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
        self._installed = asyncio.Event()
        self._reported_at = time.monotonic()

    def columns(self, version: int, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """What is put for the rows of a round."""
        raise NotImplementedError

    def needs(self, rows: Sequence[Row]) -> int:
        """The oldest version of the weights that some rows may be scored under."""
        return NO_VERSION

    async def _open(self, path: str, job: Job) -> Scorer:
        """The model at `path`, cut over the processes of the group, which open it in one turn."""
        async with job.turns.scoring(f"load of {self.role}"):
            with self._ctx.section("load", self._ctx.load_s):
                return await self._ctx.compute(self._open_scorer, path, job)

    def _open_scorer(self, path: str, job: Job) -> Scorer:
        """On the compute thread (collective)."""
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
            scored = await self._scored(job, scorer, made, rows)
            if scored.log_probs is not None:
                if rows:
                    job.bus.put_columns(made, self.columns(scored.version, scored.log_probs))
                await job.bus.ack(made)
            self._ctx.progress()
            if scored.stops:
                return
            await self._report()

    async def _scored(self, job: Job, scorer: Scorer, made: Round, rows: Sequence[Packable]) -> Scored:
        """The rows of a round, under weights that are new enough for those of every rank; not where a rank leaves."""
        needs = self.needs(made.rows)
        while True:
            async with job.turns.scoring(self.role):
                with self._ctx.span("forward", step=made.step, groups=groups_of(made)):
                    stops = (
                        self._ctx.stopping.is_set()
                    )  # asked of all: who left alone would hang the others in their next round
                    found = await self._ctx.working("forward", scorer.score, rows, needs=needs, stops=stops)
            if found.log_probs is not None or found.stops:
                return found
            async with waiting("newer weights", peer="actor", deadline_s=None):  # all ranks, for the same
                while scorer.version <= found.version:
                    self._installed.clear()
                    await self._installed.wait()

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
        await self._score_rounds(job, await self._open(str(path), job))


class ActorForwardRole(_Forward):
    role = "actor_fwd"
    replays = True

    def columns(self, version: int, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {"log_probs": log_probs, "log_probs_version": [np.array([version], np.int32)] * len(log_probs)}

    def needs(self, rows: Sequence[Row]) -> int:
        """No older than what sampled any token: pi_old stands between that and the policy in training."""
        return max((int(row.array("policy_versions").max(initial=NO_VERSION)) for row in rows), default=NO_VERSION)

    async def run(self) -> None:
        job = await open_job(self._ctx)
        scorer = await self._open(job.model_path, job)

        async def install(version: int, tensors: Mapping[str, Any]) -> None:
            await self._ctx.compute(scorer.load, version, tensors)
            self._installed.set()

        async with follow_together(self._ctx, job, self.role, install) as first:
            await first.wait()
            await self._score_rounds(job, scorer)
