"""A role that trains a model of its own: how its versions are committed, restored and saved, whatever it learns.

Owns the order of a commit, which is what makes a killed trainer harmless:

    1. every rank writes its snapshot of version k+1 into the free one of its two slots (memory the supervisor owns)
    2. barrier
    3. rank 0 asks the coordinator to commit (k+1, checksum, rows, attempt), which journals it and answers; where another role
       is trained too, the version is committed when both have asked
    4. the coordinator releases the rows
    5. what the role does with a committed version: the policy is published, a critic scores with it

All of it runs beside the first rounds of step k+1, which leave the weights alone, on a thread and with collectives of its own;
the optimizer waits for its end. Does not own rounds and steps (`roles/actor.py`, `roles/critic.py`), their computation
(`backend.py`), nor when a checkpoint is due (`saving.py`).

Invariant: a restart restores the newest committed version, which all ranks hold by construction, and gets the rounds of the
uncommitted step again. What this role alone had trained when the run was stopped is undone, and trained again when it goes on.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import orjson

from rondo.comm.ring.spans import Span
from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.roles.job import Job
from rondo.roles.training.backend import Backend
from rondo.roles.training.parity import ParityLog, RowSum
from rondo.roles.training.saving import Saving
from rondo.roles.training.work import Work
from rondo.runtime.checkpoints import newest_complete, resets
from rondo.runtime.errors import CorruptData, RondoError, Stopping
from rondo.runtime.supervision.heartbeat import SAVE
from rondo.runtime.waits import waiting
from rondo.runtime.worker.context import WorkerContext

SETTLE_LIMIT_S = 1800.0
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a version is copied from: the live tensors, looked up between two steps, and the random states of that moment."""

    state: tuple[dict[str, Any], dict[str, Any]] | None
    """As a snapshot holds it; None without one."""
    weights: Iterator[tuple[str, Any]]
    trained: Sequence[Sequence[RowSum]]
    """For the parity file: the rows of every round of the step that made it."""
    probe: np.ndarray | None = None
    """What a server is to find with it, where versions are adapters (`adapter_probe.py`)."""


class TrainableRole:
    """What the actor and the critic have in common. Whoever derives opens `_trainer`, then `_open_snapshot` and `_saving`."""

    role: str
    part: str | None = None
    """Where this role's state lies in the folder of a checkpoint; None: it is the checkpoint."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._settling: asyncio.Task[None] | None = None
        self._behind: str | None = None
        """Which role alone trains the step of the version that settles."""
        self._withdrawn = False
        self._parity: ParityLog | None = None
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="settle")
        self._job: Job
        self._trainer: Backend[Any]
        self._saving: Saving
        self._snapshot: HotSnapshot | None = None
        self._tasks: asyncio.TaskGroup

    @functools.cached_property
    def _work(self) -> Work:
        return Work.of(self._trainer.model, self._job.config.train.dtype)

    async def _publish(self, version: int, taken: Taken) -> None:
        """What is done with a version that is committed."""
        raise NotImplementedError

    async def _begin(self) -> int | None:
        """Make version 0 and commit it; None where the run is being stopped."""
        raise NotImplementedError

    def _waits(self) -> AbstractAsyncContextManager[None]:
        """While it waits for its commit."""
        raise NotImplementedError

    def _beside(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(work, name=name)

    async def _step(self, step: int) -> bool:
        """Train step `step`, and begin to commit version `step + 1`; False when no more rounds will come."""
        raise NotImplementedError

    async def _train_all(self, version: int) -> int:
        """Every step from `version` on, with the checkpoints that are due; until the last one, or until the run is stopped. The
        version that is committed then, in the trainer too."""
        if self._saving.is_due(version):
            await self._saving.save(version, final=False)  # it may have died in the middle of it
        for step in range(version, self._job.config.num_steps):
            with self._ctx.span("step", step=step):
                if not await self._step(step):
                    break
                version = step + 1
                if self._saving.is_due(version) and await self._settled():
                    await self._saving.save(version, final=False)
        if not await self._settled():
            version -= 1
            await self._undo(version)
        return version

    async def _leave(self, version: int) -> None:
        """At the committed version: saved, unless this role starts again and finds it in the hot snapshot."""
        ctx, job = self._ctx, self._job
        now = await job.bus.call("committed")
        saves = not now["restarts"] or self._snapshot is None
        # Said at several moments; true on one rank is true. All ranks must save the same.
        num_done, num_save = await self._summed([float(now["done"]), float(saves)])
        if num_save > 0:
            await self._saving.save(version, final=num_done > 0 and self.part is None)
        with ctx.section(SAVE, job.config.supervision.save_s):
            await self._saving.settled()
        if num_save == 0 and ctx.rank == 0:
            await ctx.report("kept", {"version": version})

    async def _summed(self, values: list[float]) -> list[float]:
        """Over all ranks (collective)."""
        return await self._ctx.compute(self._trainer.sum_over_ranks, values)

    # ---- a version --------------------------------------------------------------------------------------------------

    def _begin_settle(
        self, version: int, spans: list[Span], probe: np.ndarray | None = None, behind: str | None = None
    ) -> None:
        """Commit and publish what the trainer holds now, beside what comes. behind: another role alone trains the step; its
        samples are yet to be made."""
        self._behind = behind
        self._settling = self._beside(self._settle(version, spans, self._taken(probe)), "settle")

    async def _settle(self, version: int, spans: list[Span], taken: Taken) -> None:
        with self._ctx.span("commit", beside="settle", step=version - 1):
            try:
                await self._commit(version, spans, taken)
            except Stopping:  # another role was told to leave this step: `_settled` says so
                self._withdrawn = True
                return
        with self._ctx.span("publish", beside="settle", step=version - 1):
            await self._publish(version, taken)

    async def _settled(self) -> bool:
        """The newest version is committed and copied out of the trainer, which may change it now. False: it never will be, since
        the run is being stopped."""
        if self._settling is not None:
            bus = self._job.bus
            async with self._waits():
                with self._ctx.span("commit", part="wait"):  # what of it the trainer stands still for
                    peer, limit_s = (self.role, SETTLE_LIMIT_S) if self._behind is None else (self._behind, None)
                    async with waiting("settle", peer=peer, deadline_s=limit_s, moved=lambda: bus.held_up_at):
                        await self._settling
            self._settling = None
        return not self._withdrawn

    async def _commit(self, version: int, spans: list[Span], taken: Taken) -> None:
        """Steps 1 to 4 of the commit order."""
        part = await self._write_snapshot(version, taken)
        if (
            self._parity is not None
        ):  # in front of the barrier: rank 0 may commit while another rank is killed behind it
            self._parity.write(version, part, taken.trained)
        await self._keep(version - 1)  # in front of it too
        checksum = await self._copying(self._trainer.join_checksums, part)
        if self._ctx.rank == 0:
            await self._job.bus.call("commit", self._ctx.attempt, version, checksum, spans, self.role)
        await self._job.bus.call("await_version", version, commits=True)

    async def _keep(self, step: int) -> None:
        """What else is to last of a step that is to be committed."""

    def _taken(self, probe: np.ndarray | None = None) -> Taken:
        state = None if self._snapshot is None else self._trainer.state()
        parity = self._parity.taken() if self._parity is not None else ()
        return Taken(state, self._trainer.weights(), parity, probe)

    async def _write_snapshot(self, version: int, taken: Taken) -> int:
        """The snapshot of this rank, and the checksum of its part of the weights."""
        part = await self._copying(self._trainer.checksum)
        if self._snapshot is not None and taken.state is not None:
            await self._saving.let_go_of_snapshots(before=version - 1)
            await self._copying(self._snapshot.write, version, *taken.state, checksum=part)
        return part

    async def _undo(self, step: int) -> None:
        """Forget a step that is not whole, or that this role alone has trained; weights that its updates have changed are version
        `step` again."""
        if self._trainer.moved or self._withdrawn:
            assert self._snapshot is not None  # the settings ask for one where it may be needed
            await self._ctx.compute(self._trainer.load_state, *self._snapshot.read(step))
        self._trainer.discard()

    async def _committed(self, version: int) -> bool:
        """Commit what the trainer holds now, here; whether it was."""
        try:
            await self._commit(version, [], self._taken())
        except Stopping:
            return False
        return True

    async def _copying(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What reads the trainer's tensors and changes none, beside the compute thread. On a thread that nobody joins: after an
        error it may hang in a collective with a peer that is gone."""
        call = functools.partial(self._trainer.beside, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._copier, call)

    # ---- where it begins --------------------------------------------------------------------------------------------

    def _open_snapshot(self) -> None:
        """Sized from the model; every incarnation gets the same memory again."""
        ctx = self._ctx
        if self._job.config.train.hot_snapshot:
            tensors, _ = self._trainer.state()
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            num_bytes = snapshot_bytes(total, len(tensors))
            name = "/".join(filter(None, ("snapshot", ctx.group, str(ctx.rank), self.part)))
            self._snapshot = HotSnapshot(ctx.segments.segment(name, num_bytes))

    async def _restore(self) -> int | None:
        """The committed version, in this process; version 0 is made where there is none. None: it was not made, since the run is
        being stopped."""
        version = (await self._job.bus.call("committed"))["version"]
        if version is None:
            return await self._begin()
        fresh = resets(self._ctx.run_dir)
        self._trainer.count_from(fresh, version)
        # All ranks go the same way: one killed while a checkpoint was copied into its snapshot has no such version.
        held = self._snapshot is not None and version in self._snapshot.versions()
        (num_holding,) = await self._ctx.compute(self._trainer.sum_over_ranks, [float(held)])
        if self._snapshot is not None and num_holding == self._ctx.world_size:
            await self._ctx.compute(self._trainer.load_state, *self._snapshot.read(version))
            await self._prove(version, self._snapshot.checksum(version))
            return int(version)
        folder = newest_complete(self._ctx.run_dir / "checkpoints")
        if folder is None or orjson.loads((folder / "index.json").read_bytes())["version"] != version:
            raise RondoError(
                f"version {version} must lie in a hot snapshot or a checkpoint, got neither. "
                f"Set train.hot_snapshot=True, or train.save_every, to survive a death of the {self.role}."
            )
        own = folder if self.part is None else folder / self.part
        await self._ctx.compute(self._trainer.load_checkpoint, own, fresh)
        await self._write_snapshot(int(version), self._taken())
        return int(version)

    async def _prove(self, version: int, written: int | None) -> None:
        """Raises CorruptData unless this rank's weights are those that were written, as they were committed."""
        if (found := await self._copying(self._trainer.checksum)) != written:
            raise CorruptData(
                f"version {version} in the hot snapshot must have the checksum that it was written with, got {found:08x} for "
                f"{written}. Its memory was changed; resume from a checkpoint"
            )
