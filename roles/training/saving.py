"""When a checkpoint of the actor is due, and how it is written beside the training.

Owns that one is written at a time, out of the hot snapshot where there is one: the committed version lies in host memory already,
and is not copied there again. The snapshot of the version after the next one would take its place, and waits for the end of the
writing. Does not own the bytes (`models/checkpoint.py`), the wait for room on the disk (`room.py`), nor when a version is
committed (`roles/actor.py`).

    snapshot   | 4, being written | 5 |        -> 6 waits until 4 is written

Invariant: every rank saves the same versions in the same order, and whether one was written or gave way is the same on all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.weights.snapshot import HotSnapshot
from rondo.models.checkpoint import HF
from rondo.roles.resumed import copy_samples, write_samples
from rondo.roles.training.backend import Backend
from rondo.roles.training.room import save_last, when_there_is_room
from rondo.runtime.checkpoints import complete, folder_of
from rondo.runtime.supervision.heartbeat import SAVE
from rondo.runtime.waits import wait_for, waiting
from rondo.runtime.worker.context import WorkerContext

Beside = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Starts what runs beside the training; its error ends the role."""
_AGAIN_AFTER = 3
"""Versions, from one that found no room to the next that is tried: by then its end is known on every rank."""


class Saving:
    def __init__(
        self,
        ctx: WorkerContext,
        job: Any,
        trainer: Backend[Any],
        snapshot: HotSnapshot | None,
        settle: Callable[[], Awaitable[None]],
        beside: Beside,
    ) -> None:
        """settle: waits until the newest version is committed, in the snapshot and copied out of the trainer."""
        self._ctx, self._job, self._trainer, self._snapshot = ctx, job, trainer, snapshot
        self._settle, self._beside = settle, beside
        self._writing: asyncio.Task[None] | None = None
        self._version = 0
        """Which is being written, or was the last."""
        self._gave_way = False
        self._newer = asyncio.Event()
        """Set when its place is needed: a saving that waits for room gives way."""

    def is_due(self, version: int) -> bool:
        """By the settings, or because the one before found no room."""
        every, last = self._job.config.train.save_every, self._job.config.num_steps
        again = self._gave_way and version >= self._version + _AGAIN_AFTER
        return every is not None and 0 < version < last and (version % every == 0 or again)

    async def save(self, version: int, *, final: bool) -> None:
        """A checkpoint of the committed version with the whole index, so that a resumed run goes on from here. One that is not
        final is written beside the next steps, out of the snapshot, or without one out of a copy in host memory; the next saving
        waits for it.

        On a full disk the final one waits for room; one beside the training does so until its snapshot's place is needed, or the
        next is due, and then gives way.
        """
        ctx = self._ctx
        since = time.monotonic()
        folder = folder_of(ctx.run_dir / "checkpoints", version)
        limit_s = self._job.config.supervision.save_s
        section = functools.partial(ctx.section, SAVE, limit_s)
        with section():
            await self._settle()
            self._newer.set()
            await self.settled()
            self._newer = newer = asyncio.Event()
            whole = folder in complete(folder.parent)  # a run that ends, or is stopped, before its next commit
            index = (await self._job.bus.call("checkpoint", version))["state"] if ctx.rank == 0 and not whole else b""
            extra = {"version": version, "index": orjson.Fragment(index or b"{}")}
            # The index names samples that other roles may let go of meanwhile; those of open groups stay until this role commits.
            kept = await asyncio.to_thread(copy_samples, self._job.bus, index) if index else []
            beside = functools.partial(write_samples, kept=kept)
            if not final and not whole:
                held = None if self._snapshot is None else self._snapshot.views(version)
                staged = await ctx.compute(self._trainer.stage, held)
        if whole:
            if final and not (folder / HF).exists():
                export = functools.partial(self._trainer.export, folder / HF, self._job.model_path)
                await save_last(ctx, self._job.config, version, export)
            return
        if final:
            path = self._job.model_path
            save = functools.partial(self._trainer.save, folder, extra, beside, tokenizer_path=path)
            since += await save_last(ctx, self._job.config, version, save)
            await self._saved(version, folder, len(kept), since, time.monotonic() - since)
            return

        self._version, self._gave_way = version, False

        async def attempt(gives_way: bool) -> bool:
            written = asyncio.to_thread(self._trainer.write, folder, staged, extra, beside, gives_way=gives_way)
            with ctx.span("save", beside="checkpoint", version=version):
                return await wait_for(written, name="save", peer="storage", deadline_s=limit_s)

        async def write_beside(pause_s: float) -> None:
            """An error ends the role, as one of training does."""
            none = contextlib.nullcontext
            # Without a deadline: the next saving, or the last, ends the wait.
            waited_s = await when_there_is_room(
                ctx, attempt, version=version, section=none, deadline_s=None, newer=newer
            )
            if waited_s is None:
                self._gave_way = True
            else:
                await self._saved(version, folder, len(kept), since + waited_s, pause_s)

        self._writing = self._beside(write_beside(time.monotonic() - since), "save")

    async def settled(self) -> None:
        """Nothing is being written any more."""
        if self._writing is not None:
            await self._writing

    async def let_go_of_snapshots(self, *, before: int) -> None:
        """Whose place is taken now: what is written out of one is waited for, unless it waits for room itself."""
        if self._writing is None or self._writing.done() or self._version >= before:
            return
        self._newer.set()
        with self._ctx.span("save", part="wait", beside="settle"):
            async with waiting("snapshot", peer="storage", deadline_s=self._job.config.supervision.save_s):
                await asyncio.wait([self._writing])

    async def _saved(self, version: int, folder: Path, num_samples: int, since: float, pause_s: float) -> None:
        """Tell of a whole checkpoint, begun at `since` (room that was waited for left out), for which training stood still for
        `pause_s`, and of the untrained samples in it."""
        if self._ctx.rank == 0:
            took = {"save_s": time.monotonic() - since, "pause_s": pause_s}
            figures = {"version": version, "path": str(folder), "num_samples": num_samples} | took
            await self._ctx.report("checkpoint", figures)
