"""actor: trains the policy. Runs the rounds of a step as they become ready, commits, publishes, saves.

Owns the order of a commit, which is what makes a killed actor harmless:

    1. every rank writes its snapshot of version k+1 into the free one of its two slots (memory the supervisor owns)
    2. barrier
    3. rank 0 asks the coordinator to commit (k+1, checksum, rows, attempt), which journals it and answers; where another role
       is trained too, the version is committed when both have asked
    4. the coordinator releases the rows
    5. k+1 is published

All of it runs beside the first rounds of step k+1, which leave the weights alone, on a thread and with collectives of its own;
the optimizer waits for its end.

A restart restores the newest committed version, which all ranks hold by construction, publishes it again, and gets the rounds
of the uncommitted step again. Owns no computation and no saving (`training/`), and no decision about rows (the coordinator).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, TypeVar

import orjson

from rondo.comm.bus.bus import POLL_S, Round
from rondo.comm.ring.spans import Span
from rondo.comm.weights.publisher import Copied, Publisher
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.comm.weights.together import other_part
from rondo.models.attention import chosen
from rondo.roles.algorithms.algorithm import OldLogProbs
from rondo.roles.algorithms.whitening import Contribution, contribution
from rondo.roles.forward import REFERENCE
from rondo.roles.job import SLAB, open_job, timed
from rondo.roles.training.backend import Backend
from rondo.roles.training.mismatch import refuse_gap
from rondo.roles.training.objective import PolicyObjective, open_policy
from rondo.roles.training.parity import ParityLog, RowSum
from rondo.roles.training.reading import Read, read, sum_of
from rondo.roles.training.saving import Saving
from rondo.roles.training.sft import backend_of
from rondo.roles.training.step_totals import StepTotals
from rondo.roles.training.warm_up import run_warm_up
from rondo.runtime.checkpoints import newest_complete
from rondo.runtime.errors import RondoError
from rondo.runtime.supervision.heartbeat import SAVE
from rondo.runtime.waits import totals as totals_of_waits
from rondo.runtime.waits import wait_for, waiting
from rondo.runtime.worker.context import WorkerContext

PUBLISH_LIMIT_S = 600.0
SETTLE_LIMIT_S = 1800.0
P = ParamSpec("P")
T = TypeVar("T")

_WARM_UP_RECORD = 20
"""Steps of the warm-up from one record of it to the next."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a version is copied from: the live tensors, looked up between two steps, and the random states of that moment."""

    state: tuple[dict[str, Any], dict[str, Any]] | None
    """As a snapshot holds it; None without one."""
    weights: Iterator[tuple[str, Any]]
    trained: Sequence[Sequence[RowSum]]
    """For the parity file: the rows of every round of the step that made it."""


class ActorRole:
    role = "actor"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._settling: asyncio.Task[None] | None = None
        self._parity: ParityLog | None = None
        self._read_ahead: dict[str, Read] = {}  # by the round's key
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="settle")

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
            await self._publish(version, self._taken())
            await ctx.ready()
            await self._train_and_save(version)
        # Only where all went well: after an error the process ends, and must not wait for a gathering that no peer will join.
        if self._publisher is not None:
            self._publisher.close()

    async def _load(self) -> int | None:
        """The trainer, its memory, and the committed version; None where there is none yet, and none is made any more."""
        job, ctx = self._job, self._ctx
        with ctx.section("load", ctx.load_s):
            await ctx.compute(ctx.init_process_group, job.device)
            self._trainer = await ctx.compute(self._open_trainer)
            if ctx.rank == 0:
                await ctx.report("attention", asdict(chosen(self._trainer.model)) | {"dtype": job.config.train.dtype})
            if job.config.deterministic:
                self._parity = ParityLog(ctx.run_dir, ctx.rank)
            if job.lent is not None and self._trainer.lent is not None:
                job.lent.set_result(self._trainer.lent)
            self._open_memory()
            self._saving = Saving(ctx, job, self._trainer, self._snapshot, self._settled, self._beside)
            return await self._restore()

    def _beside(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(work, name=name)

    def _open_trainer(self) -> Backend[PolicyObjective]:
        """On the compute thread."""
        job, ctx = self._job, self._ctx
        lends = job.lent is not None
        return open_policy(job.config, job.model_path, world_size=ctx.world_size, device=job.device, lends=lends)

    async def _train_and_save(self, version: int) -> None:
        config, job = self._job.config, self._job
        if self._saving.is_due(version):
            await self._saving.save(version, final=False)  # it may have died in the middle of it
        self._step_began = time.monotonic()
        for step in range(version, config.num_steps):
            with self._ctx.span("step", step=step):
                async with job.turns.training():
                    metrics = await self._train(step)
                if metrics is not None and self._saving.is_due(step + 1):
                    await self._saving.save(step + 1, final=False)
            if metrics is None:  # the run is being stopped, or its data ended: leave at the committed version
                async with job.turns.training():
                    await self._settled()
                    done = (await job.bus.call("committed"))["done"]
                    # Said at several moments; true on one rank is true. All ranks must save the same.
                    (num_done,) = await self._ctx.compute(self._trainer.sum_over_ranks, [float(done)])
                    await self._saving.save(step, final=num_done > 0)
                    with self._ctx.section(SAVE, self._job.config.supervision.save_s):
                        await self._saving.settled()
                return
        async with job.turns.training():
            await self._saving.save(config.num_steps, final=True)

    # ---- one step ---------------------------------------------------------------------------------------------------

    async def _train(self, step: int) -> dict[str, Any] | None:
        """Train step `step` and commit version `step + 1`; None when no more rounds will come."""
        config, trainer = self._job.config, self._trainer
        busy, whole, totals = 0.0, False, StepTotals(config.max_staleness)
        if self._parity is not None:
            self._parity.taken()  # of a step that ran before and was not whole
        if self._job.rests and not await self._take_memory(step):
            return None
        if config.algorithm.normalize_batch is not None or self._scores_ahead:
            if (ahead_s := await self._look_ahead(step)) is None:
                trainer.discard()
                return None
            busy += ahead_s
        following = step + 1 if step + 1 < config.num_steps else None
        async for made in self._rounds(step, then=following):
            rows, seen = await self._rows(made)
            if self._job.takes_turns:
                await self._job.turns.make_room()
            if self._parity is not None:
                self._parity.add([sum_of(named, row) for named, row in zip(made.rows, rows, strict=True)])
            since = time.monotonic()
            with self._ctx.span("train", step=step, num_rows=len(rows)):
                await self._ctx.working(
                    "train", trainer.accumulate, step, rows, made.spans, last=made.closes, update=made.update
                )
            if made.closes and not made.last:
                await self._settled()  # the optimizer changes what the version before is still copied from
                with self._ctx.span("train", step=step, part="optimizer"):
                    await self._ctx.working("optimizer", trainer.update, step)
            busy += time.monotonic() - since
            self._job.bus.check(made)
            if made.update < config.train.optimizer_steps_per_batch:  # later passes use the same rows
                totals.add(made.rows, seen)
            whole = made.last
            self._ctx.progress()
        if not whole:
            await self._undo(step)
            return None
        await self._settled()
        since = time.monotonic()
        with self._ctx.span("train", step=step, part="optimizer"):
            figures, trained = await self._ctx.working("optimizer", trainer.finish, step)
        busy += time.monotonic() - since
        step_s = time.monotonic() - self._step_began
        self._step_began = time.monotonic()
        summed = totals.of(await self._ctx.compute(trainer.sum_over_ranks, totals.sums()))
        metrics: dict[str, Any] = figures | summed | {
            "step": step, "version": step + 1, "step_s": step_s, "train_s": busy, "wait_s": max(0.0, step_s - busy),
            "waits_s": totals_of_waits(),
        }  # fmt: skip
        # Told before the commit: an actor that dies in between tells the step again, and none is ever missing.
        if self._ctx.rank == 0:
            with self._ctx.span("wait for coordinator", step=step):
                metrics |= await self._job.bus.call("longest_wait", step)
            with self._ctx.span("report", step=step):
                await self._ctx.report("metrics", metrics)
            refuse_gap(metrics, config.train.max_log_prob_gap)
        self._settling = self._tasks.create_task(self._settle(step + 1, trained, self._taken()), name="settle")
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
        return self._old == "self" and self._job.config.train.optimizer_steps_per_batch > 1

    async def _look_ahead(self, step: int) -> float | None:
        """What must be known of all rows of a step before the first gradient: the statistics of whitening, and the old log-probs
        of later mini-batches. The seconds that it computed; None when no more rounds will come.

        The rounds are let go of, and asked for again: they are the same, and what they view need not be held together.
        """
        trainer, config = self._trainer, self._job.config
        over, num_batches, busy = config.algorithm.normalize_batch, config.train.optimizer_steps_per_batch, 0.0
        parts: list[Contribution] = []
        async with aclosing(self._rounds(step)) as rounds:
            async for made in rounds:
                if over is not None:
                    parts += [contribution(row.array("advantages"), row.array("loss_mask"), over) for row in made.rows]
                if self._scores_ahead and made.update > 0:
                    rows, _ = await self._rows(made)
                    if self._job.takes_turns:
                        await self._job.turns.make_room()
                    since = time.monotonic()
                    with self._ctx.span("train", step=step, part="score", num_rows=len(rows)):
                        await self._ctx.working("score", trainer.objective.score, trainer.model, rows, made.spans)
                    busy += time.monotonic() - since
                    self._ctx.progress()
                self._job.bus.check(made)
                if made.closes and made.update == num_batches - 1:
                    if over is not None:
                        trainer.objective.whiten(await self._ctx.compute(trainer.gathered, parts, 3))
                    return busy
        return None

    async def _take_memory(self, step: int) -> bool:
        """Once a step has all its rounds, and so nothing is generated for it any more, its memory for the trainer. False when no
        more rounds will come."""
        last = self._job.config.train.optimizer_steps_per_batch - 1
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

    async def _undo(self, step: int) -> None:
        """Forget a step that is not whole; weights that some of its updates have changed are version `step` again."""
        if self._trainer.moved:
            assert self._snapshot is not None  # the settings ask for one where a step makes several updates
            tensors, state = self._snapshot.read(step)
            await self._ctx.compute(self._trainer.load_state, tensors, state)
        self._trainer.discard()

    async def _settle(self, version: int, spans: list[Span], taken: Taken) -> None:
        """Commit and publish a version."""
        with self._ctx.span("commit", beside="settle", step=version - 1):
            await self._commit(version, spans, taken)
        with self._ctx.span("publish", beside="settle", step=version - 1):
            await self._publish(version, taken)

    async def _settled(self) -> None:
        """The newest version is committed and copied out of the trainer, which may change it now."""
        if self._settling is not None:
            bus = self._job.bus
            async with self._job.turns.waiting():
                with self._ctx.span("commit", part="wait"):  # what of it the trainer stands still for
                    async with waiting("settle", peer="actor", deadline_s=SETTLE_LIMIT_S, moved=lambda: bus.held_up_at):
                        await self._settling
            self._settling = None

    async def _copying(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What reads the trainer's tensors and changes none, beside the compute thread. On a thread that nobody joins: after an
        error it may hang in a collective with a peer that is gone."""
        call = functools.partial(self._trainer.beside, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._copier, call)

    async def _rows(self, made: Round) -> Read:
        """What `_read` makes of a round; of one that was asked for ahead it is there."""
        found = self._read_ahead.pop(made.key, None)
        self._read_ahead.clear()  # of rounds that nobody came for
        return found if found is not None else await self._ctx.compute(self._read, made)

    async def _prepare(self, made: Round) -> None:
        """Beside the compute thread, which works on the round before."""
        self._read_ahead[made.key] = await asyncio.to_thread(self._read, made)

    def _read(self, made: Round) -> Read:
        return read(made, self._job.config, old=self._old, has_actor_fwd=self._job.has_actor_fwd)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _open_memory(self) -> None:
        """The snapshot and the slab, sized from the model; every incarnation gets the same memory again."""
        ctx, config = self._ctx, self._job.config
        self._snapshot: HotSnapshot | None = None
        if config.train.hot_snapshot:
            tensors, _ = self._trainer.state()
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            num_bytes = snapshot_bytes(total, len(tensors))
            self._snapshot = HotSnapshot(ctx.segments.segment(f"snapshot/{ctx.group}/{ctx.rank}", num_bytes))
        self._publisher: Publisher | None = None
        self._slab: WeightSlab | None = None
        self._publishing: asyncio.Task[None] | None = None
        if self._trainer.mesh.replica == 0 and self._job.publishes:
            weights, num_slots = self._trainer.shapes().values(), config.num_weight_slots
            bucket_bytes, total = config.bus.weight_bucket_bytes, sum(tensor.nbytes for tensor in weights)
            segment = ctx.segments.segment(SLAB, slab_bytes(total, len(weights), num_slots, bucket_bytes))
            self._slab = WeightSlab(segment, num_slots)
            if ctx.rank == 0:
                self._publisher = Publisher(self._slab, bucket_bytes=bucket_bytes, beside=self._trainer.publishing)

    async def _restore(self) -> int | None:
        """The committed version, in this process; version 0 is made (and warmed up) where there is none. None: it was not made,
        since the run is being stopped."""
        committed = await self._job.bus.call("committed")
        version = committed["version"]
        if version is None:
            return await self._begin()
        # All ranks go the same way: one killed while a checkpoint was copied into its snapshot has no such version.
        held = self._snapshot is not None and version in self._snapshot.versions()
        (num_holding,) = await self._ctx.compute(self._trainer.sum_over_ranks, [float(held)])
        if self._snapshot is not None and num_holding == self._ctx.world_size:
            tensors, state = self._snapshot.read(version)
            await self._ctx.compute(self._trainer.load_state, tensors, state)
            return int(version)
        folder = newest_complete(self._ctx.run_dir / "checkpoints")
        if folder is None or orjson.loads((folder / "index.json").read_bytes())["version"] != version:
            raise RondoError(
                f"version {version} must lie in a hot snapshot or a checkpoint, got neither. "
                "Set train.hot_snapshot=True, or train.save_every, to survive a death of the actor."
            )
        await self._ctx.compute(self._trainer.load_checkpoint, folder)
        await self._write_snapshot(int(version), self._taken())
        return int(version)

    async def _begin(self) -> int | None:
        ctx, job, trainer = self._ctx, self._job, self._trainer
        if job.config.sft is not None:
            with ctx.span("warm up"):
                beside = functools.partial(backend_of, trainer.model, job.config.sft, beside=trainer)
                if not await run_warm_up(ctx, job.config, job.model_path, beside, every=_WARM_UP_RECORD):
                    return None
        if job.config.algorithm.needs_reference and job.config.sft is not None:
            await ctx.compute(trainer.export, ctx.run_dir / REFERENCE, job.model_path)
        await self._commit(0, [], self._taken())
        return 0

    async def _commit(self, version: int, spans: list[Span], taken: Taken) -> None:
        """Steps 1 to 4 of the commit order."""
        part = await self._write_snapshot(version, taken)
        if (
            self._parity is not None
        ):  # in front of the barrier: rank 0 may commit while another rank is killed behind it
            self._parity.write(version, part, taken.trained)
        checksum = await self._copying(self._trainer.join_checksums, part)
        if self._ctx.rank == 0:
            await self._job.bus.call("commit", self._ctx.attempt, version, checksum, spans, self.role)
        await self._job.bus.call("await_version", version, commits=True)

    def _taken(self) -> Taken:
        state = None if self._snapshot is None else self._trainer.state()
        return Taken(state, self._trainer.weights(), self._parity.taken() if self._parity is not None else ())

    async def _write_snapshot(self, version: int, taken: Taken) -> int:
        """The snapshot of this rank, and the checksum of its part of the weights."""
        if self._snapshot is not None and taken.state is not None:
            await self._saving.let_go_of_snapshots(before=version - 1)
            await self._copying(self._snapshot.write, version, *taken.state)
        return await self._copying(self._trainer.checksum)

    async def _publish(self, version: int, taken: Taken) -> None:
        """Step 5. Every rank of the first copy writes its part into the slab; sends run beside the next step. Who generates
        with the trainer's device has its memory before it hears of the version."""
        rests, lent = self._job.rests, self._trainer.lent
        if lent is not None and not rests:
            lent.holds(version)
        copied = await self._copied(version, taken)
        if rests:
            if taken.state is not None:
                taken.state[0].clear()  # what else holds the device's memory
            with self._ctx.span("rest", beside="memory"):
                await self._copying(self._trainer.rest)
            if lent is not None:
                lent.holds(version)
        if copied is not None:
            self._publishing = self._tasks.create_task(self._end_publish(copied), name="publication")

    async def _copied(self, version: int, taken: Taken) -> Copied | None:
        """The version in its slot, on rank 0."""
        if self._slab is None:
            return None
        if self._publisher is None:
            return await self._copying(
                other_part, self._slab, taken.weights, self._trainer.publishing, attempt=self._ctx.attempt,
                version=version, bucket_bytes=self._job.config.bus.weight_bucket_bytes,
            )  # fmt: skip
        if self._publishing is not None:  # its slot counts as free until it is told complete
            await self._publishing
        slot = (await self._job.bus.call("begin_publish", version, deadline_s=POLL_S))["slot"]
        return await self._copying(
            self._publisher.copy, slot, attempt=self._ctx.attempt, version=version, tensors=taken.weights
        )

    async def _end_publish(self, copied: Copied) -> None:
        sent, id = asyncio.wrap_future(copied.sent), copied.id
        with self._ctx.span("publish", beside="publication", version=id.version):
            await self._job.bus.call("end_publish", copied.slot, id.version, id.checksum)
            await wait_for(sent, name="publication", peer="publisher", deadline_s=PUBLISH_LIMIT_S)
