"""supervised: the job of a run that has no rollouts: it trains on rows with their answers, in the place of the actor.

Owns the steps, when the rows that are held out are measured, and checkpoints. Does not own what is made of rows and the loss
(`training/supervised.py`), nor how a checkpoint lies on disk. Killed, it goes on from its newest checkpoint: nothing of it
lies in memory that outlives it.

    step 0 .. 9 | measure | save 10 | step 10 ..      (save: of a copy in host memory, beside the steps that follow)

Invariant: a checkpoint has the position in the order of rows beside weights, optimizer and random states, so a run that is
resumed trains on the same batches to the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rondo.models.attention import chosen
from rondo.roles.config import JobConfig, SupervisedConfig
from rondo.roles.data.fingerprints import FILE as FINGERPRINTS
from rondo.roles.job import open_settings, roles_of
from rondo.roles.sampling.versions import Versions
from rondo.roles.training.backend import Backend
from rondo.roles.training.preference import PreferenceLoss
from rondo.roles.training.room import save_last, saved, when_there_is_room
from rondo.roles.training.supervised import Learning
from rondo.roles.training.warm_up import open_learning
from rondo.runtime.checkpoints import NoRoom, complete, folder_of, newest_complete, resets
from rondo.runtime.waits import wait_for, waiting
from rondo.runtime.worker.context import WorkerContext

_LOOK_S = 0.2
_TELL_S = 10.0
"""How often the pass over the rows before the first step says how far it is."""


class SupervisedRole:
    role = "actor"

    _backend: Backend[Any]
    _learn: Callable[[int], Learning]
    _learning: Learning

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._config: JobConfig
        self._own: SupervisedConfig
        self._path: str
        self._versions: Versions | None = None
        self._writing: asyncio.Task[None] | None = None
        self._newer = asyncio.Event()
        """Set when the next checkpoint is due: one that waits for room gives way."""

    async def run(self) -> None:
        ctx = self._ctx
        self._config, self._path, device = open_settings(ctx)
        assert self._config.own is not None
        self._own = self._config.own
        measures = any("rollout" in each for each in roles_of(ctx.run_dir).values())
        self._versions = Versions(ctx.run_dir, ctx.attempt) if measures else None
        with ctx.section("load", ctx.load_s):
            await ctx.compute(ctx.init_process_group, device)
            await ctx.compute(self._open, device)
            if ctx.rank == 0:
                told = asdict(chosen(self._backend.model)) | {"dtype": self._config.train.dtype}
                await ctx.report("attention", told)
        if not await self._refer():
            await ctx.report("unsaved", {"cause": "stopped before the first step"})
            return
        with ctx.section("load", ctx.load_s):
            version = await ctx.compute(self._restore)
        await ctx.ready()
        async with asyncio.TaskGroup() as tasks:  # a checkpoint that cannot be written ends the role with its error
            version, is_done = await self._train(version, tasks)
            await self._settled()
        if is_done:
            await self._hand_over(version, is_last=True)
        await self._save_last(version, is_done=is_done)
        if is_done and ctx.rank == 0 and self._versions is not None:
            self._versions.end()

    def _open(self, device: str) -> None:
        """With the weights that the job begins with (on the compute thread, collective)."""
        ctx = self._ctx
        self._backend, self._learn = open_learning(
            self._config, self._path, ctx.run_dir, world_size=ctx.world_size, device=device
        )
        self._learning = self._learn(0)

    async def _refer(self) -> bool:
        """What the weights that the job begins with say of its rows, where the loss asks for it: computed once, and kept in the
        run directory. False when it was cut short by a stop."""
        ctx, backend = self._ctx, self._backend
        objective = backend.objective
        if not isinstance(objective, PreferenceLoss) or not objective.refers:
            return True
        rows = zlib.crc32((ctx.run_dir / FINGERPRINTS).read_bytes())  # others, once they are accepted, are scored anew
        file, batches = ctx.run_dir / f"reference-{rows:08x}.npz", self._learning.ahead()
        if await ctx.compute(backend.sum_over_ranks, [float(file.exists())]) == [ctx.world_size]:
            await ctx.compute(objective.take, file)
            return True

        def refer() -> bool | None:
            """Whether there was a batch; None at a stop."""
            if backend.sum_over_ranks([float(ctx.stopping.is_set())])[0]:
                return None
            batch: Any = next(batches, None)
            if batch is not None:
                objective.refer(backend, batch)
            return batch is not None

        told = time.monotonic()
        while went := await ctx.working("refer", refer):
            ctx.progress()
            if ctx.rank == 0 and time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                await ctx.report("reference", {"pairs": len(objective.reference)})
        if went is not None and ctx.rank == 0:
            await ctx.compute(objective.keep, file)
            await ctx.report("reference", {"pairs": len(objective.reference), "computed": True})
        return went is not None

    def _restore(self) -> int:
        """The version that is trained on from: that of the newest checkpoint, or 0 (collective)."""
        folder = newest_complete(self._checkpoints)
        fresh = resets(self._ctx.run_dir)
        kept = {"version": 0, "position": 0} if folder is None else self._backend.load_checkpoint(folder, fresh)
        self._backend.count_from(fresh, int(kept["version"]))
        self._learning = self._learn(kept["position"])
        if self._versions is not None and self._ctx.rank == 0:
            self._versions.begin(int(kept["version"]))
        self._backend.sum_over_ranks([])  # nobody looks before that
        return int(kept["version"])

    @property
    def _checkpoints(self) -> Path:
        return self._ctx.run_dir / "checkpoints"

    async def _train(self, version: int, tasks: asyncio.TaskGroup) -> tuple[int, bool]:
        """Every step from `version` on: the version that they end with, and whether none is left."""
        ctx, own, every = self._ctx, self._own, self._config.train.save_every
        if version == 0:
            await self._measure(version)
            await self._hand_over(version)
        num_steps = self._config.num_steps
        while version < num_steps:
            began = time.monotonic()
            with ctx.span("step", step=version), ctx.span("train", step=version):
                stops, made = await ctx.working("train", self._step, version)
            if made is None:
                if not stops and version % (
                    own.evaluate_every or 1
                ):  # fewer steps than there are rows for could be used
                    await self._measure(version)
                return version, not stops
            version += 1
            took = {"step_s": time.monotonic() - began, "train_s": time.monotonic() - began}
            ctx.progress()
            if ctx.rank == 0:
                await ctx.report("metrics", {"job": self._config.job, **made, "version": version, **took})
                await ctx.report("committed", {"version": version})
            if own.evaluate_every is not None and (version % own.evaluate_every == 0 or version == num_steps):
                await self._measure(version)
            await self._hand_over(version)
            if every is not None and version % every == 0 and version < num_steps:
                await self._save(version, tasks)
        return version, True

    def _step(self, step: int) -> tuple[bool, dict[str, Any] | None]:
        """Whether a rank is to stop, and else what the step was; None behind the last row (collective)."""
        # A rank that left alone would hang the others in their next collective.
        if self._backend.sum_over_ranks([float(self._ctx.stopping.is_set())])[0]:
            return True, None
        return False, self._learning.step(step)

    async def _measure(self, version: int) -> None:
        if self._own.evaluate_every is None:
            return
        ctx = self._ctx
        with ctx.span("evaluate", step=version):
            figures = await ctx.working("evaluate", self._learning.evaluate)
        if ctx.rank == 0:
            await ctx.report("metrics", {"evaluation": {"version": version, "reward": None, "figures": figures}})

    async def _hand_over(self, version: int, *, is_last: bool = False) -> None:
        """The weights to who measures their answers, where that is due; one version may wait beside the one that is measured
        (collective)."""
        ctx, backend, versions, evaluation = self._ctx, self._backend, self._versions, self._config.evaluation
        if versions is None or evaluation is None:
            return
        every = evaluation.every is not None and version > 0 and version % evaluation.every == 0
        due = every or (evaluation.at_start and version == 0) or (evaluation.at_end and is_last)
        if not due or versions.knows(version):
            return
        async with waiting("evaluation", peer="rollout", deadline_s=None):
            while True:
                told = [float(ctx.stopping.is_set()), float(len(versions.waiting()) > 1)]
                stops, crowded = await ctx.compute(backend.sum_over_ranks, told)
                if stops:
                    return
                if not crowded:
                    break
                ctx.progress()  # who measures has deadlines of its own
                await asyncio.sleep(_LOOK_S)
        try:
            with ctx.section("save", self._config.supervision.save_s):
                await ctx.compute(backend.export, versions.folder_of(version), self._path)
        except NoRoom as error:
            if ctx.rank == 0:
                await ctx.report("evaluation_skipped", {"version": version, "why": str(error)})

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _extra(self, version: int) -> dict[str, Any]:
        """What a checkpoint knows beside the state of the trainer; there are no samples to index."""
        return {"version": version, "position": self._learning.position, "index": {}}

    async def _save(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """A checkpoint, written beside the steps that follow."""
        ctx, backend, began = self._ctx, self._backend, time.monotonic()
        limit_s, folder, extra = (
            self._config.supervision.save_s,
            folder_of(self._checkpoints, version),
            self._extra(version),
        )
        self._newer.set()
        await self._settled()
        self._newer = newer = asyncio.Event()
        staged = await ctx.compute(backend.stage)
        pause_s = time.monotonic() - began

        async def attempt(gives_way: bool) -> bool:
            written = asyncio.to_thread(backend.write, folder, staged, extra, gives_way=gives_way)
            with ctx.span("save", beside="checkpoint", version=version):
                return await wait_for(written, name="save", peer="storage", deadline_s=limit_s)

        async def write() -> None:
            waited_s = await when_there_is_room(
                ctx, attempt, version=version, section=contextlib.nullcontext, deadline_s=None, newer=newer,
                stop_s=self._config.supervision.grace_s,
            )  # fmt: skip
            if waited_s is not None:
                await saved(ctx, version, folder, 0, began + waited_s, pause_s)

        self._writing = tasks.create_task(write(), name="save")

    async def _settled(self) -> None:
        """Nothing is being written any more."""
        if self._writing is not None:
            await self._writing

    async def _save_last(self, version: int, *, is_done: bool) -> None:
        """The state where it ends, with a Hugging Face folder once all is done; a disk without room is waited for."""
        backend, folder, began = self._backend, folder_of(self._checkpoints, version), time.monotonic()
        path = self._path if is_done else None
        if folder not in complete(self._checkpoints):
            save = functools.partial(backend.save, folder, self._extra(version), tokenizer_path=path)
        elif path is not None:
            save = functools.partial(backend.add_result, folder, path)
        else:
            return
        waited_s = await save_last(self._ctx, self._config, version, save)
        if waited_s is not None:
            await saved(self._ctx, version, folder, 0, began + waited_s, time.monotonic() - began - waited_s)
