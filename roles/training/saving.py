"""When a checkpoint of the actor is due, and how it is written beside the training.

Owns that one is written at a time, out of the hot snapshot where there is one: the committed version lies in host memory already,
and is not copied there again. The snapshot of the version after the next one would take its place, and waits for the end of the
writing. Does not own the bytes (`models/checkpoint.py`), the wait for room on the disk (`room.py`), nor when a version is
committed (`roles/actor.py`).

    snapshot   | 4, being written | 5 |        -> 6 waits until 4 is written

A critic's state is a part of the actor's checkpoint: it writes its own aside (`parts.py`), and the actor takes that in before the
checkpoint counts.

Invariant: every rank saves the same versions in the same order, and whether one was written or gave way is the same on all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.weights.snapshot import HotSnapshot
from rondo.roles.resumed import KeptRow, copy_samples, write_samples
from rondo.roles.training.backend import Backend
from rondo.roles.training.parts import Parts
from rondo.roles.training.room import save_last, saved, when_there_is_room
from rondo.runtime.checkpoints import complete, folder_of
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.supervision.heartbeat import SAVE
from rondo.runtime.waits import wait_for, waiting
from rondo.runtime.worker.context import WorkerContext

Beside = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Starts what runs beside the training; its error ends the role."""
LOOK_S = 0.2
"""From one look for another role's part to the next."""
_AGAIN_AFTER = 3
"""Versions, from one that found no room to the next that is tried: by then its end is known on every rank."""


class Saving:
    def __init__(
        self,
        ctx: WorkerContext,
        job: Any,
        trainer: Backend[Any],
        snapshot: HotSnapshot | None,
        settle: Callable[[], Awaitable[object]],
        beside: Beside,
        *,
        part: str | None = None,
        waits: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """settle: waits until the newest version is committed, in the snapshot and copied out of the trainer. part: what is saved
        is a part of a checkpoint, of that name, and not the checkpoint; waits: around a wait for such a part."""
        self._ctx, self._job, self._trainer, self._snapshot = ctx, job, trainer, snapshot
        self._settle, self._beside = settle, beside
        critic = job.config.critic is not None
        self._own, self._waits = part, waits
        self._parts = Parts(ctx.run_dir / "checkpoints", part or "critic", ctx.attempt) if critic else None
        self._writing: asyncio.Task[None] | None = None
        self._version = 0
        """Which is being written, or was the last."""
        self._gave_way = False
        self._newer = asyncio.Event()
        """Set when its place is needed: a saving that waits for room gives way."""

    def is_due(self, version: int) -> bool:
        """By the settings, or because the one before found no room."""
        every, last = self._job.config.train.save_every, self._job.config.num_steps
        # Of two roles both must save it, and one does not hear that the other gave way.
        again = self._gave_way and version >= self._version + _AGAIN_AFTER and self._parts is None
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
        checkpoints = ctx.run_dir / "checkpoints"
        folder = folder_of(checkpoints, version)
        limit_s = self._job.config.supervision.save_s
        section = functools.partial(ctx.section, SAVE, limit_s)
        with section():
            await self._settle()
            self._newer.set()
            await self.settled()
            self._newer = newer = asyncio.Event()
            whole = folder in complete(checkpoints)  # a run that ends, or is stopped, before its next commit
            extra: dict[str, Any] = {"version": version}
            beside, kept = None, []
            if self._own is not None:
                assert self._parts is not None
                folder = self._parts.folder(version)
                whole |= self._parts.is_whole(version)
            else:
                index = b""
                if ctx.rank == 0 and not whole:
                    index = (await self._job.bus.call("checkpoint", version))["state"]
                extra["index"] = orjson.Fragment(index or b"{}")
                # The index names samples that other roles may let go of meanwhile; those of open groups stay until this role
                # commits.
                kept = await asyncio.to_thread(copy_samples, self._job.bus, index) if index else []
                beside = functools.partial(self._write_more, version=version, kept=kept)
            if not final and not whole:
                held = None if self._snapshot is None else self._snapshot.views(version)
                staged = await ctx.compute(self._trainer.stage, held)
            if final and not whole:
                async with self._waits():
                    await self._part_is_there(version, limit_s)
        if whole:
            if final:
                add = functools.partial(self._trainer.add_result, folder, self._job.model_path)
                await save_last(ctx, self._job.config, version, add)
            return
        if final:
            path = self._job.model_path
            save = functools.partial(self._trainer.save, folder, extra, beside, tokenizer_path=path)
            waited_s = await save_last(ctx, self._job.config, version, save)
            if waited_s is not None:
                since += waited_s
                await saved(ctx, version, folder, len(kept), since, time.monotonic() - since)
            return

        self._version, self._gave_way = version, False

        async def attempt(gives_way: bool) -> bool:
            try:
                gives_way |= not await self._part_is_there(version, limit_s)
            except DeadlineExceeded:  # its disk may be full: the next checkpoint is another try
                gives_way = True
            written = asyncio.to_thread(self._trainer.write, folder, staged, extra, beside, gives_way=gives_way)
            with ctx.span("save", beside="checkpoint", version=version):
                return await wait_for(written, name="save", peer="storage", deadline_s=limit_s)

        async def write_beside(pause_s: float) -> None:
            """An error ends the role, as one of training does."""
            none = contextlib.nullcontext
            # Without a deadline: the next saving, or a stop, ends the wait.
            waited_s = await when_there_is_room(
                ctx, attempt, version=version, section=none, deadline_s=None, newer=newer,
                stop_s=self._job.config.supervision.grace_s,
            )  # fmt: skip
            self._gave_way = waited_s is None
            if self._own is not None and self._parts is not None:
                if ctx.rank == 0:
                    self._parts.none_before(version + self._gave_way)
            elif waited_s is not None:
                await saved(ctx, version, folder, len(kept), since + waited_s, pause_s)

        self._writing = self._beside(write_beside(time.monotonic() - since), "save")

    def _write_more(self, folder: Path, *, version: int, kept: Sequence[KeptRow]) -> None:
        """What the checkpoint `folder` has beside the trainer's state."""
        write_samples(folder, kept)
        if self._parts is not None:
            self._parts.take(version, folder)

    async def _part_is_there(self, version: int, limit_s: float) -> bool:
        """Waits for the other role's part of a checkpoint. False where it does not come: that role died after it committed a
        newer version, or gave way."""
        parts = self._parts
        if parts is None or self._own is not None:
            return True
        async with waiting("critic's part of a checkpoint", peer="critic", deadline_s=limit_s):
            while not parts.is_whole(version):
                if parts.never_comes(version):
                    return False
                await asyncio.sleep(LOOK_S)
        return True

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
