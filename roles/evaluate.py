"""evaluate: the evaluation sets of a job under the weights that a folder has: the rollout role, without samples for training.

Owns which folder: of a run without a step the model's, as version 0, which nobody trains or publishes; beside a job without
rollouts each that its trainer hands over (`sampling/versions.py`). All else is the rollout role's: engine, workflow, rewards.

Invariant: a process that is killed beside such a job begins the version anew that it measured, and costs the training nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rondo.comm.bus.versions import engine_reader
from rondo.roles.config import JobConfig
from rondo.roles.data.cursor import Order
from rondo.roles.data.datasets import Rows, demonstrations
from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.data.questions import answered_sets
from rondo.roles.engines.embedded.embedded import EmbeddedEngine
from rondo.roles.engines.replica import Replica
from rondo.roles.job import Job
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.versions import Versions
from rondo.runtime.waits import happens

_TRAINED = "actor"
_LOOK_S = 0.2


class OwnWeights(Replica):
    """Engines with the weights of the model's folder."""

    @asynccontextmanager
    async def newest_weights(self) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        yield 0, await asyncio.to_thread(_tensors, Path(self._job.model_path))

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[asyncio.Event]:
        ctx, bus = self._ctx, self._job.bus
        if self._job.config.rollout.sglang is not None:  # servers say which version they have, and prove it
            async with self.newest_weights() as (version, tensors):
                await self._install(version, tensors)
        await bus.call("commit", ctx.attempt, 0, 0, [], _TRAINED)
        await bus.call("proved", engine_reader(ctx.rank), 0)
        first = asyncio.Event()
        first.set()
        yield first


class EvaluateRole(RolloutRole):
    """Measures the model of a run without a step. Of a job without rollouts, answers to the rows that it holds out."""

    open_replica: type[Replica] = OwnWeights
    keeps_all = True

    async def _open_job(self) -> Job:
        job = await super()._open_job()
        config = job.config
        if config.own is None:
            return job
        # Weights are whole where adapters are trained.
        of = {"data": config.demonstrated(), "train": config.train.model_copy(update={"lora": None})}
        return replace(job, config=config.model_copy(update=of))

    def _open_data(self, config: JobConfig) -> tuple[Rows, Order, Mapping[str, Rows]]:
        if config.own is None:
            return super()._open_data(config)
        fingerprints = Fingerprints.of_run(self._ctx.run_dir)
        rows, held_out = demonstrations(config, fingerprints)
        return rows, Order(len(rows), config.seed), answered_sets(config, held_out, fingerprints)


class Measured(Replica):
    """One engine, which gets the weights of each version that it is to measure."""

    evaluates = False  # no versions that are published

    async def open(self, ends: AsyncExitStack) -> None:
        num_slots = self._job.config.rollout.num_slots
        slots = await self._ctx.compute(functools.partial(self._build, num_slots, evaluates=True))
        self.engine = EmbeddedEngine(slots, self._generation)

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[asyncio.Event]:
        first = asyncio.Event()
        first.set()
        yield first


class AnswersRole(EvaluateRole):
    """Measures the answers of a job without rollouts beside its training, in the first process of the role."""

    open_replica = Measured
    keeps_all = False

    async def run(self) -> None:
        if self._ctx.rank:
            await self._ctx.ready()
            return
        await super().run()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        ctx, versions = self._ctx, Versions(self._ctx.run_dir, self._ctx.attempt)
        while not ctx.stopping.is_set():
            if waiting := versions.waiting():
                measuring = tasks.create_task(self._measure(versions, waiting[0]))
                await self._unless_leaving(measuring)
                measuring.cancel()  # of one that leaves
            elif versions.ended():
                return
            else:
                await happens(ctx.stopping, _LOOK_S)

    async def _measure(self, versions: Versions, version: int) -> None:
        ctx, engine, label = self._ctx, self._replica.engine, f"version_{version}"
        await engine.update_weights(version, await asyncio.to_thread(_tensors, versions.folder_of(version)))
        with ctx.span("evaluate", beside="evaluation", version=version):
            part = await self._evaluator.evaluate(engine, label, version, num_slots=self._replica.num_slots)
        found = self._result(version, [part])
        await ctx.report("metrics", {"evaluation": {"label": label, **found}})
        await asyncio.to_thread(versions.done, version, found)

    async def _evaluate_beside(self) -> None:
        """Nothing that is published."""


def _tensors(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
