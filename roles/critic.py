"""critic: learns values of the policy's states, and scores samples with them. PPO's second trainable role.

Owns when samples are scored, under which version, and the critic's steps. A version is committed together with the actor's
(`training/trainable.py`), so values come from weights that no restart forgets. Owns no computation (`training/values.py`), and no
decision about rows (the coordinator).

    values    a round of samples -> values, with their version beside them -> put -> acknowledge
    critic    step k: rounds with returns -> gradient -> optimizer -> version k+1 prepared -> committed with the actor's

Both are turns on the compute thread of the process (`training/compute_turns.py`), alone or in the actor's waits, in one order on
all ranks. Between the optimizer and the commit nothing is scored: those weights may be withdrawn. Where a step has several
updates, the first begins when all of its samples are scored.

Invariant: the values of a row, and so its advantages and returns, are of one committed version.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

import numpy as np

from rondo.comm.bus.bus import POLL_S, Round
from rondo.models.device_memory import device_memory
from rondo.models.packing import Sequence as Packable
from rondo.roles.algorithms.value_loss import with_explained_variance
from rondo.roles.forward import REFERENCE, media_of
from rondo.roles.job import groups_of, open_job, timed
from rondo.roles.streams import BEHIND, VALUES
from rondo.roles.training.backend import Backend
from rondo.roles.training.parts import Parts
from rondo.roles.training.saving import Saving
from rondo.roles.training.step_totals import StepTotals, ages_of
from rondo.roles.training.trainable import Taken, TrainableRole
from rondo.roles.training.values import ValueObjective, ValueRow, open_critic
from rondo.runtime.waits import totals as totals_of_waits
from rondo.runtime.waits import waiting
from rondo.runtime.worker.context import WorkerContext


class CriticRole(TrainableRole):
    role = part = "critic"
    _trainer: Backend[ValueObjective]

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(ctx)
        self._version: int | None = None
        """Of the weights in the trainer, once it is committed: the same on all ranks in every turn."""
        self._scores = asyncio.Event()

    async def run(self) -> None:
        ctx = self._ctx
        self._job = job = await open_job(ctx)
        path = await self._path()
        async with job.turns.scoring("load of critic"):
            with ctx.section("load", ctx.load_s):
                version = await self._load(path)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if version is None and not await self._committed(0):
                return  # stopped before there was anything to save
            version = version or 0
            if ctx.rank == 0:
                Parts(ctx.run_dir / "checkpoints", self.part, ctx.attempt).open(version)
            await self._publish(version)
            await ctx.ready()
            tasks.create_task(self._score_rounds(), name="values")
            await self._train_and_save(version)

    async def _path(self) -> str:
        """Where its weights are, before any version of it is committed."""
        job = self._job
        assert job.config.critic is not None
        if job.config.critic.path is not None:
            return job.config.critic.path
        if job.config.sft is None or (await job.bus.call("committed"))["version"] is not None:
            return job.model_path
        await job.bus.call("await_version", 0, by="actor", deadline_s=POLL_S)  # which the warm-up makes
        return str(self._ctx.run_dir / REFERENCE)

    async def _load(self, path: str) -> int | None:
        ctx, job = self._ctx, self._job
        await ctx.compute(ctx.init_process_group, job.device)
        paths = path, job.model_path
        opened = functools.partial(open_critic, job.config, *paths, world_size=ctx.world_size, device=job.device)
        self._trainer = await ctx.compute(opened)
        self._open_snapshot()
        self._saving = Saving(ctx, job, self._trainer, self._snapshot, self._settled, self._beside, part=self.part)
        return await self._restore()

    async def _begin(self) -> None:
        """Version 0 is committed outside of the turn of the load, since the actor of this process may need one to commit it."""

    def _waits(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def _publish(self, version: int, taken: Taken | None = None) -> None:
        async with self._job.turns.scoring("version of critic"):
            self._version = version
        self._scores.set()

    # ---- scoring ----------------------------------------------------------------------------------------------------

    async def _score_rounds(self) -> None:
        bus = self._job.bus
        async for made in timed(self._ctx, bus.stream(VALUES, tokens=self._tokens)):
            version, values = await self._scored(made)
            if made.rows:
                bus.put_columns(made, self._columns(made, version, values))
            await bus.ack(made)
            self._ctx.progress()

    async def _scored(self, made: Round) -> tuple[int, list[np.ndarray]]:
        """(version, values of each row of a round), of all ranks under one committed version."""
        trainer, behind, bus = self._trainer, self._job.config.algorithm.bootstrap_truncated, self._job.bus
        rows = [Packable(row.array("tokens"), row.response, media_of(row)) for row in made.rows]
        while True:
            if self._ctx.rank == 0:  # others come when it has a turn
                async with waiting("committed critic", peer="actor", deadline_s=POLL_S, moved=lambda: bus.held_up_at):
                    await self._scores.wait()
            async with self._job.turns.scoring(VALUES):
                if self._version is None:  # another turn of this role came first
                    continue
                with self._ctx.span("forward", step=made.step, groups=groups_of(made)):
                    score = functools.partial(trainer.objective.score, trainer.model, rows, behind=behind)
                    return self._version, await self._ctx.working("forward", score)

    def _columns(self, made: Round, version: int, values: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        found = {
            VALUES: [each[: row.response] for each, row in zip(values, made.rows, strict=True)],
            "values_version": [np.array([version], np.int32)] * len(values),
        }
        if self._job.config.algorithm.bootstrap_truncated:
            found[BEHIND] = [each[-1:] for each in values]
        return found

    # ---- steps ------------------------------------------------------------------------------------------------------

    async def _train_and_save(self, version: int) -> None:
        self._step_began = time.monotonic()
        version = await self._train_all(version)
        if self._version is None:  # what was trained since is undone
            await self._publish(version)
        await self._leave(version)

    async def _summed(self, values: list[float]) -> list[float]:
        async with self._job.turns.scoring(self.role):
            return await super()._summed(values)

    async def _step(self, step: int) -> bool:
        config, trainer, bus = self._job.config, self._trainer, self._job.bus
        busy, whole, totals = 0.0, False, StepTotals(config.max_staleness)
        following = step + 1 if step + 1 < config.num_steps else None
        stream = bus.stream(self.role, tokens=self._tokens, step=step, then=following)
        async with aclosing(timed(self._ctx, stream)) as rounds:
            async for made in rounds:
                accumulate = functools.partial(trainer.accumulate, last=made.closes, update=made.update)
                rows = [ValueRow.of(row) for row in made.rows]
                busy += await self._turn("train", step, functools.partial(accumulate, step, rows, made.spans))
                if made.closes and not made.last:
                    if not await self._settled():  # the optimizer changes what the version before is still copied from
                        break
                    busy += await self._turn("optimizer", step, functools.partial(trainer.update, step), moves=True)
                bus.check(made)
                if made.update < config.train.num_mini_batches:  # later passes use the same rows
                    totals.add(made.rows, [ages_of(row.array("policy_versions"), step) for row in made.rows])
                whole = made.last
                self._ctx.progress()
        if not whole or not await self._settled():
            await self._undo(step)
            return False
        ended: list[Any] = []

        def finish() -> None:
            ended[:] = *trainer.finish(step), totals.of(trainer.sum_over_ranks(totals.sums()))

        busy += await self._turn("optimizer", step, finish, moves=True)
        figures, trained, summed = ended
        step_s = time.monotonic() - self._step_began
        self._step_began = time.monotonic()
        if self._ctx.rank == 0:
            times = {"step_s": step_s, "train_s": busy, "wait_s": max(0.0, step_s - busy)}
            times |= self._work.figures(summed["tokens"], totals.squares, step_s, busy, self._ctx.world_size)
            record: dict[str, Any] = {"critic": {"step": step} | with_explained_variance(figures) | times}
            if not config.trains_policy(step):  # nobody else tells of this step
                record |= summed | times | {"step": step, "version": step + 1}
            beside = {"waits_s": totals_of_waits()} | device_memory(self._job.device)
            await self._ctx.report("metrics", record | beside)
        self._begin_settle(step + 1, trained)
        return True

    async def _turn(self, name: str, step: int, work: Callable[[], object], *, moves: bool = False) -> float:
        """One turn of its training (collective); the seconds that it computed. moves: the weights, so that they are of no
        committed version any more."""
        async with self._job.turns.scoring(self.role):
            if self._job.takes_turns:
                await self._job.turns.make_room()
            if moves:
                self._version = None
                self._scores.clear()
            since = time.monotonic()
            with self._ctx.span("train", step=step, part=name):
                await self._ctx.working(name, work)
        return time.monotonic() - since

    @property
    def _tokens(self) -> int:
        assert self._job.config.critic is not None
        return self._job.config.critic.micro_batch_tokens
