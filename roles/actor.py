"""actor: trains the policy. Runs the rounds of a step as they become ready, commits, publishes, saves.

Owns the policy's steps, and publication: the last part of a commit, whose order and restarts it has in common with the critic
(`training/trainable.py`). The rounds of step k+1 run beside the commit of step k, and its optimizer waits for the end of that.
Owns no computation and no saving (`training/`), and no decision about rows (the coordinator).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import POLL_S, Round
from rondo.comm.ring.spans import Span
from rondo.comm.weights.held import VersionId
from rondo.comm.weights.publication import publish
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.together import other_part
from rondo.models.attention import chosen
from rondo.models.device_memory import device_memory
from rondo.roles.algorithms.algorithm import OldLogProbs
from rondo.roles.algorithms.whitening import Contribution, contribution
from rondo.roles.forward import REFERENCE
from rondo.roles.job import SLAB, open_job, timed
from rondo.roles.training.adapter_probe import Prober
from rondo.roles.training.adapter_probe import write as write_probe
from rondo.roles.training.backend import Backend
from rondo.roles.training.hooks import Hooks
from rondo.roles.training.mismatch import Canary, refuse_gap
from rondo.roles.training.objective import PolicyObjective, open_policy
from rondo.roles.training.parity import ParityLog
from rondo.roles.training.profiling import Window
from rondo.roles.training.reading import Read, read, sum_of
from rondo.roles.training.saving import Saving
from rondo.roles.training.sft import backend_of
from rondo.roles.training.step_totals import StepTotals
from rondo.roles.training.trainable import Taken, TrainableRole
from rondo.roles.training.trained_samples import TrainedSamples
from rondo.roles.training.warm_up import run_warm_up
from rondo.runtime.waits import totals as totals_of_waits
from rondo.runtime.worker.context import WorkerContext

_WARM_UP_RECORD = 20
"""Steps of the warm-up from one record of it to the next."""


class ActorRole(TrainableRole):
    role = "actor"

    _trainer: Backend[PolicyObjective]

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(ctx)
        self._prober: Prober | None = None
        self._read_ahead: dict[str, Read] = {}  # by the round's key
        self._kept: TrainedSamples | None = None
        self._window: Window | None = None
        self._hooks = Hooks()

    async def run(self) -> None:
        ctx = self._ctx
        self._job = job = await open_job(ctx)
        async with job.turns.training():  # collective from here on, and so is what scores in this process
            version = await self._load()
        if version is None:
            await ctx.report("unsaved", {"cause": "stopped in the warm-up: there is no version to save yet"})
            return
        async with asyncio.TaskGroup() as tasks:  # a publication that fails beside a step ends the role with its error
            self._tasks = tasks
            await self._publish(version, self._taken(await self._probed()))
            await ctx.ready()
            if job.config.samples.keep:
                self._kept = TrainedSamples(ctx.run_dir, job.config.samples, ctx.rank, ctx.world_size)
                await asyncio.to_thread(self._kept.begin, version)
            if (window := job.config.debug.profile) is not None:
                self._window = Window(window, ctx.run_dir / "profile", ctx.rank)
            await self._train_and_save(version)

    async def _load(self) -> int | None:
        """The trainer, its memory, and the committed version; None where there is none yet, and none is made any more."""
        job, ctx = self._job, self._ctx
        with ctx.section("load", ctx.load_s):
            await ctx.compute(ctx.init_process_group, job.device)
            self._trainer = await ctx.compute(self._open_trainer)
            self._hooks = await ctx.compute(Hooks, job.config.train.before_step, job.config.train.after_step)
            if ctx.rank == 0:
                await ctx.report("attention", asdict(chosen(self._trainer.model)) | {"dtype": job.config.train.dtype})
                await ctx.report("device", self._work.told())
            if job.config.deterministic:
                self._parity = ParityLog(ctx.run_dir, ctx.rank)
            if job.lent is not None and self._trainer.lent is not None:
                job.lent.set_result(self._trainer.lent)
            self._open_memory()
            self._saving = Saving(
                ctx, job, self._trainer, self._snapshot, self._settled, self._beside, waits=job.turns.waiting
            )
            return await self._restore()

    def _waits(self) -> AbstractAsyncContextManager[None]:
        return self._job.turns.waiting()

    def _open_trainer(self) -> Backend[PolicyObjective]:
        """On the compute thread."""
        job, ctx, lora = self._job, self._ctx, self._job.config.train.lora
        lends = job.lent is not None
        trainer = open_policy(job.config, job.model_path, world_size=ctx.world_size, device=job.device, lends=lends)
        if lora is not None and job.config.adapts_engines:
            canary = Canary.of(trainer.model, lora, job.config.rollout.max_prompt_tokens)
            if ctx.rank == 0:
                canary.write(ctx.run_dir)
            if job.config.rollout.sglang is not None:
                self._prober = Prober(trainer.model, canary.prompts)
        return trainer

    async def _train_and_save(self, version: int) -> None:
        job = self._job
        self._step_began = time.monotonic()
        version = await self._train_all(version)
        async with job.turns.training():
            await self._leave(version)

    async def _step(self, step: int) -> bool:
        async with self._job.turns.training():
            if self._job.config.trains_policy(step):
                await self._ctx.working("before_step", self._hooks.before, step)
                return await self._profiled(step)
            if await self._settled():  # a step that trains the critic alone
                self._begin_settle(step + 1, [], await self._probed(), behind="critic")
        return not self._withdrawn

    async def _profiled(self, step: int) -> bool:
        """`_train`, in the window that `debug.profile` asks for; whether it was whole."""
        if (window := self._window) is None:
            return await self._train(step) is not None
        await self._ctx.compute(window.begin, step)
        whole = await self._train(step) is not None
        if why := await self._ctx.compute(window.end, step, leaves=not whole):
            await self._ctx.report("profile_failed", {"step": step, "rank": self._ctx.rank, "why": why})
        return whole

    # ---- one step ---------------------------------------------------------------------------------------------------

    async def _train(self, step: int) -> dict[str, Any] | None:
        """Train step `step` and commit version `step + 1`; None when no more rounds will come."""
        config, trainer = self._job.config, self._trainer
        busy, whole, totals = (
            0.0,
            False,
            StepTotals(
                config.max_staleness, list(config.data.sources), list(config.components) if config.num_parts else ()
            ),
        )
        trains, spans = not config.debug.rollout_only, list[Span]()
        if self._parity is not None:
            self._parity.taken()  # of a step that ran before and was not whole
        if self._kept is not None:
            self._kept.forget(step)
        if self._job.rests and not await self._take_memory(step):
            return None
        if trains and (config.algorithm.normalize_batch is not None or self._scores_ahead or config.measures_drift):
            if (ahead_s := await self._look_ahead(step)) is None:
                trainer.discard()
                return None
            busy += ahead_s
        following = step + 1 if step + 1 < config.num_steps else None
        async for made in self._rounds(step, then=following):
            rows, seen = await self._rows(made)
            if self._parity is not None:
                self._parity.add([sum_of(named, row) for named, row in zip(made.rows, rows, strict=True)])
            since = time.monotonic()
            if trains:
                with self._ctx.span("train", step=step, num_rows=len(rows)):
                    await self._ctx.working(
                        "train", trainer.accumulate, step, rows, made.spans, last=made.closes, update=made.update
                    )
            elif made.update < config.train.num_mini_batches:
                spans += made.spans
            if trains and made.closes and not made.last:
                if not await self._settled():  # the optimizer changes what the version before is still copied from
                    break
                with self._ctx.span("train", step=step, part="optimizer"):
                    await self._ctx.working("optimizer", trainer.update, step)
            busy += time.monotonic() - since
            self._job.bus.check(made)
            if made.update < config.train.num_mini_batches:  # later passes use the same rows
                totals.add(made.rows, seen)
                if self._kept is not None:
                    self._kept.add(step, made.index, made.update, made.rows, rows)
            whole = made.last
            self._ctx.progress()
        if not whole:
            await self._undo(step)
            return None
        if not await self._settled():
            trainer.discard()
            return None
        since = time.monotonic()
        with self._ctx.span("train", step=step, part="optimizer"):
            if trains:
                figures, trained = await self._ctx.working("optimizer", trainer.finish, step)
            else:
                figures, trained = {}, await self._ctx.compute(trainer.gathered, spans, 4, torch.int64)
        busy += time.monotonic() - since
        step_s = time.monotonic() - self._step_began
        self._step_began = time.monotonic()
        summed = totals.of(await self._ctx.compute(trainer.sum_over_ranks, totals.sums()))
        metrics: dict[str, Any] = figures | summed | {
            "step": step, "version": step + 1, "step_s": step_s, "train_s": busy, "wait_s": max(0.0, step_s - busy),
            "waits_s": totals_of_waits(),
        }  # fmt: skip
        if trains:
            metrics |= self._work.figures(summed["tokens"], totals.squares, step_s, busy, self._ctx.world_size)
        metrics |= device_memory(self._job.device)
        # Told before the commit: an actor that dies in between tells the step again, and none is ever missing.
        if self._ctx.rank == 0:
            with self._ctx.span("wait for coordinator", step=step):
                metrics |= await self._job.bus.call("step_on_bus", step)
        metrics |= await self._ctx.working("after_step", self._hooks.after, step, metrics)
        if self._ctx.rank == 0:
            with self._ctx.span("report", step=step):
                await self._ctx.report("metrics", metrics)
            if trains:
                refuse_gap(metrics, config)
        self._begin_settle(step + 1, trained, await self._probed())
        self._ctx.progress()
        return metrics

    async def _rounds(self, step: int, then: int | None = None) -> AsyncGenerator[Round, None]:
        """The rounds of a step; while one is waited for, other roles of this process may compute."""
        tokens = self._job.config.train.micro_batch_tokens
        stream = self._job.bus.stream(self.role, tokens=tokens, step=step, then=then, prepare=self._prepare)
        async with aclosing(timed(self._ctx, stream)) as rounds:
            while True:
                async with self._job.turns.waiting():
                    made = await anext(rounds, None)
                if made is None:
                    return
                yield made

    @property
    def _old(self) -> OldLogProbs:
        return self._job.config.old_log_probs(has_actor_fwd=self._job.has_actor_fwd)

    @property
    def _scores_ahead(self) -> bool:
        """Whether some rows' first update comes after others, and nobody else says what their ratios compare with."""
        return self._old == "self" and self._job.config.train.num_mini_batches > 1

    async def _look_ahead(self, step: int) -> float | None:
        """What must be known of all rows of a step before the first gradient: the statistics of whitening, the old log-probs of
        later mini-batches, and how far all are from what sampled them. The seconds that it computed; None when no more rounds
        will come.

        The rounds are let go of, and asked for again: they are the same, and what they view need not be held together.
        """
        trainer, config = self._trainer, self._job.config
        over, num_batches, busy = config.algorithm.normalize_batch, config.train.num_mini_batches, 0.0
        parts: list[Contribution] = []
        async with aclosing(self._rounds(step)) as rounds:
            async for made in rounds:
                if over is not None:
                    in_order = sorted(made.rows, key=lambda row: (row.group, row.sample))
                    for _, own in groupby(in_order, key=lambda row: (row.group, row.sample)):
                        both = [(row.array("advantages"), row.array("loss_mask")) for row in own]
                        advantages, mask = (np.concatenate(each) for each in zip(*both, strict=True))
                        parts.append(contribution(advantages, mask, over))
                if config.measures_drift or (self._scores_ahead and made.update > 0):
                    rows, _ = await self._rows(made)
                    since = time.monotonic()
                    with self._ctx.span("train", step=step, part="score", num_rows=len(rows)):
                        await self._ctx.working("score", trainer.objective.score, trainer.model, rows, made.spans)
                    busy += time.monotonic() - since
                    self._ctx.progress()
                self._job.bus.check(made)
                if made.closes and made.update == num_batches - 1:
                    if over is not None:
                        trainer.objective.whiten(await self._ctx.compute(trainer.gathered, parts, 3))
                    if config.measures_drift:
                        await self._ctx.compute(trainer.objective.measure_drift, trainer.sum_over_ranks)
                    return busy
        return None

    async def _take_memory(self, step: int) -> bool:
        """Once a step has all its rounds, and so nothing is generated for it any more, its memory for the trainer. False when no
        more rounds will come."""
        last = self._job.config.train.num_mini_batches - 1
        async with aclosing(self._rounds(step)) as rounds:
            async for made in rounds:
                self._job.bus.check(made)
                if made.closes and made.update == last:
                    break
            else:
                return False
        await self._job.turns.make_room()
        with self._ctx.span("wake", beside="memory"):
            await self._ctx.compute(self._trainer.wake)
        return True

    async def _rows(self, made: Round) -> Read:
        """What `_read` makes of a round; of one that was asked for ahead it is there. Then there is room to train on it."""
        found = self._read_ahead.pop(made.key, None)
        self._read_ahead.clear()  # of rounds that nobody came for
        if found is None:
            found = await self._ctx.compute(self._read, made)
        if self._job.takes_turns:
            await self._job.turns.make_room()
        return found

    async def _prepare(self, made: Round) -> None:
        """Beside the compute thread, which works on the round before."""
        self._read_ahead[made.key] = await asyncio.to_thread(self._read, made)

    def _read(self, made: Round) -> Read:
        return read(made, self._job.config, old=self._old, has_actor_fwd=self._job.has_actor_fwd)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _open_memory(self) -> None:
        """The snapshot and the slab, sized from the model; every incarnation gets the same memory again."""
        ctx, config = self._ctx, self._job.config
        self._open_snapshot()
        self._slab: WeightSlab | None = None
        self._publishing: asyncio.Task[None] | None = None
        if self._trainer.mesh.replica == 0 and self._job.publishes:
            weights, num_slots = self._trainer.shapes().values(), config.num_weight_slots
            bucket_bytes, total = config.bus.weight_bucket_bytes, sum(tensor.nbytes for tensor in weights)
            segment = ctx.segments.segment(SLAB, slab_bytes(total, len(weights), num_slots, bucket_bytes))
            self._slab = WeightSlab(segment, num_slots)

    async def _begin(self) -> int | None:
        ctx, job, trainer = self._ctx, self._job, self._trainer
        if job.config.sft is not None:
            with ctx.span("warm up"):
                balance = trainer.objective.balance
                beside = functools.partial(backend_of, trainer.model, job.config.sft, beside=trainer, balance=balance)
                if not await run_warm_up(ctx, job.config, job.model_path, beside, every=_WARM_UP_RECORD):
                    return None
        if job.config.needs_initial and job.config.sft is not None:
            await ctx.compute(trainer.export, ctx.run_dir / REFERENCE, job.model_path)
        async with job.turns.waiting():  # others of this process may have to commit it, too
            return 0 if await self._committed(0) else None

    async def _keep(self, step: int) -> None:
        if self._kept is not None:
            await self._kept.write(step)

    async def _probed(self) -> np.ndarray | None:
        """What a server is to find with the adapters as they are."""
        return None if self._prober is None else await self._ctx.working("probe", self._prober.measure)

    async def _publish(self, version: int, taken: Taken) -> None:
        """Step 5. Every rank of the first copy writes its part into the slab; others are told beside the next step. Who generates
        with the trainer's device has its memory before it hears of the version."""
        rests, lent = self._job.rests, self._trainer.lent
        if lent is not None and not rests:
            lent.holds(version)
        if self._prober is not None and taken.probe is not None and self._ctx.rank == 0:
            name = f"{self._ctx.attempt}.{version}"
            told = self._prober.prompts, self._prober.base, taken.probe
            await asyncio.to_thread(write_probe, self._ctx.run_dir, name, *told)
        copied = await self._copied(version, taken)
        if rests:
            if taken.state is not None:
                taken.state[0].clear()  # what else holds the device's memory
            with self._ctx.span("rest", beside="memory"):
                await self._copying(self._trainer.rest)
            if lent is not None:
                lent.holds(version)
        if copied is not None:
            self._publishing = self._tasks.create_task(self._end_publish(*copied), name="publication")

    async def _copied(self, version: int, taken: Taken) -> tuple[int, VersionId] | None:
        """The slot that has the version, on rank 0."""
        ctx, slab = self._ctx, self._slab
        if slab is None:
            return None
        beside = self._trainer.publishing
        how: dict[str, Any] = {
            "attempt": ctx.attempt, "version": version, "bucket_bytes": self._job.config.bus.weight_bucket_bytes,
        }  # fmt: skip
        if ctx.rank > 0:
            return await self._copying(other_part, slab, taken.weights, beside, **how)
        if self._publishing is not None:  # its slot counts as free until it is told complete
            await self._publishing
        slot = (await self._job.bus.call("begin_publish", version, deadline_s=POLL_S))["slot"]
        return slot, await self._copying(publish, slab, slot, tensors=taken.weights, beside=beside, **how)

    async def _end_publish(self, slot: int, id: VersionId) -> None:
        with self._ctx.span("publish", beside="publication", version=id.version):
            await self._job.bus.call("end_publish", slot, id.version, id.checksum)
