"""rollout: from leased prompt groups to finished samples on the bus.

Owns the concurrency of a replica: how many groups are in flight, what becomes of each, and the proof of new weights. Does not
own which prompt comes next (the coordinator admits, `cursor.py` orders), how tokens are made (an `Engine`) or scored.

    lease -> prompt, media -> engine -> reward -> (filter) -> put          every group ends in exactly one of:
                                   |          |         put of its n samples, settled as filtered, error, lease lost
                                 error     filtered

Invariant: a sample that was put is never generated again (a new lease names what is there), and a group whose lease is lost
puts nothing more and gives its reservation back. The media of a prompt are read, decoded and processed once a group, by workers
beside this process, when its lease begins; so what is looked ahead is bounded by the leases in flight.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rondo.comm.bus import POLL_S
from rondo.comm.coordinator import EVALUATION_READER
from rondo.comm.group import NO_VERSION
from rondo.comm.records import Column
from rondo.comm.slab import WeightSlab
from rondo.models.load import load_model, load_tokenizer
from rondo.models.media.inputs import MediaInputs
from rondo.roles.config import DataConfig
from rondo.roles.datasets import Row, RowError, open_splits, train_order
from rondo.roles.determinism import settle
from rondo.roles.fingerprints import Fingerprints
from rondo.roles.forward import REPORT_S
from rondo.roles.job import SLAB, follow, open_job
from rondo.roles.kept import KeptSamples, put_kept
from rondo.roles.media import MediaPool
from rondo.roles.prompts import render_prompt
from rondo.roles.rollout.dispatch.dispatcher import Dispatcher
from rondo.roles.rollout.embedded import EmbeddedEngine, slot_engine
from rondo.roles.rollout.engine import Completion, Engine, Request, SamplingParams
from rondo.roles.rollout.evaluation import Evaluator, item_of, sample_seed
from rondo.roles.rollout.leases import Progress
from rondo.roles.rollout.lent import Flip, Lent
from rondo.roles.rollout.rewards import RewardPool, RewardResult
from rondo.roles.rollout.serve.endpoint import endpoint
from rondo.roles.rollout.share import Share
from rondo.roles.rollout.slots import SlotEngine
from rondo.roles.streams import ROUTED, base_columns
from rondo.runtime.checkpoints import newest_complete
from rondo.runtime.context import WorkerContext
from rondo.runtime.record import JsonLines
from rondo.runtime.waits import totals


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one prompt group. `have`: sample -> reward of what an earlier lease has put; `has_media`: it has
    put the media."""

    group: int
    epoch: int
    step: int
    position: int
    ring: str
    have: Mapping[int, float]
    has_media: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored completion."""

    number: int
    completion: Completion
    reward: float
    details: Mapping[str, Any]


class RolloutRole:
    role = "rollout"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        # By (group, epoch): a group whose lease was lost can come back here before its old task has ended.
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()  # the engine sleeps, and has requests
        self._installing = asyncio.Lock()
        self._lent: Lent | None = None  # the trainer's tensors, where the engine generates with them

    async def run(self) -> None:
        ctx = self._ctx
        self._job = job = await open_job(ctx)
        config = job.config
        limits = config.reward
        # A group's samples one after the other, by workers of which each starts anew.
        self._slowest_reward_s = 2 * limits.deadline_s * config.rollout.samples_per_prompt + ctx.load_s
        self._progress = Progress(limits.deadline_s)
        self._rewards = RewardPool(
            limits.function, num_workers=limits.num_workers, deadline_s=limits.deadline_s, load_deadline_s=ctx.load_s
        )
        self._media = (
            None if config.media is None else MediaPool(job.model_path, config.media, load_deadline_s=ctx.load_s)
        )
        async with AsyncExitStack() as pools:
            # Their workers take seconds to import what they need: meanwhile this process loads the model, or servers do.
            async with asyncio.TaskGroup() as opening:
                for pool in (self._rewards, self._media):
                    if pool is not None:
                        opening.create_task(pools.enter_async_context(pool))
                starting_s = 0.0 if config.rollout.sglang is None else config.rollout.sglang.start_deadline_s
                with ctx.section("load", ctx.load_s + starting_s):
                    self._tokenizer = await ctx.compute(load_tokenizer, job.model_path)
                    fingerprints = Fingerprints.of_run(ctx.run_dir)
                    self._data, held_out = await ctx.compute(open_splits, config, fingerprints)
                    self._order = train_order(config, len(self._data))
                    newest = newest_complete(ctx.run_dir / "checkpoints")
                    self._kept = await asyncio.to_thread(KeptSamples.read, newest, base_columns(config))
                    self._engine: Engine = await self._open_engine(pools)
                    self._beside = await self._open_beside()
                    self._evaluator = Evaluator(
                        config,
                        held_out,
                        self._tokenizer,
                        self._rewards,
                        self._prompt,
                        self._params(config.rollout.temperature),
                    )
            async with self._follow() as first:
                await first.wait()
                await pools.enter_async_context(self._endpoint())
                await ctx.ready()
                async with asyncio.TaskGroup() as tasks:
                    beside = [tasks.create_task(each) for each in (self._renew(), self._report(), self._waking())]
                    evaluating = tasks.create_task(self._evaluate_beside())
                    await self._work(tasks)
                    if not ctx.stopping.is_set():
                        await self._unless_leaving(evaluating)
                    for task in (*beside, evaluating):
                        task.cancel()
        await self._engine.close()
        if self._beside is not None:
            await self._beside.close()

    async def _open_engine(self, ends: AsyncExitStack) -> Engine:
        if self._job.config.rollout.sglang is not None:
            return await self._open_servers(ends)
        evaluation = self._job.config.evaluation
        evaluates = evaluation is not None and (evaluation.at_start or evaluation.at_end)
        num_slots = self._job.config.rollout.num_slots
        self._lent = await self._job.lent if self._job.lent is not None else None
        slots = await self._ctx.compute(
            self._build,
            num_slots,
            evaluates=evaluates,
            lent=self._lent,
            sleeps=self._job.takes_turns,
            tells_experts=self._job.config.train.router_replay,
        )
        engine = EmbeddedEngine(slots, self._generation, wake=self._wake.set)
        if self._job.takes_turns:

            async def make_room() -> None:
                if not (engine.asleep or self._generates()):
                    with self._ctx.span("sleep", beside="memory"):
                        await self._ctx.compute(engine.sleep)

            self._job.turns.make_room = make_room
        return engine

    async def _open_servers(self, ends: AsyncExitStack) -> Engine:
        """SGLang servers, which load the model themselves; they are kept there, and ended with `ends`."""
        from rondo.roles.rollout.sglang.kept import kept
        from rondo.roles.rollout.sglang.open import kept_engines, one_engine, releases_memory

        engines = kept_engines(self._ctx, self._job, newest=self._newest_weights)
        await ends.enter_async_context(kept(engines))
        if releases_memory(self._job):

            async def make_room() -> None:
                await asyncio.gather(*(engine.sleep() for engine in engines))

            self._job.turns.make_room = make_room
        return one_engine(engines, newest=self._newest_weights)

    @asynccontextmanager
    async def _newest_weights(self) -> AsyncIterator[tuple[int, Mapping[str, Any]] | None]:
        """What was published last, for a server that was started anew, while the body reads it; None when the run is over."""
        ctx, job, reader = self._ctx, self._job, f"{self.role}.{self._ctx.rank}.restart"
        held = await job.bus.call("weights", reader, -1, deadline_s=POLL_S)
        if "slot" not in held:
            yield None
            return
        try:
            slab = WeightSlab(ctx.segments.segment(SLAB, 0), job.config.num_weight_slots)
            place = {"attempt": held["attempt"], "version": held["version"], "checksum": held["checksum"]}
            yield held["version"], await asyncio.to_thread(functools.partial(slab.read, held["slot"], **place))
        except Exception:  # where it is cancelled the process ends, and what it holds with it
            await job.bus.call("let_go", reader)
            raise
        await job.bus.call("let_go", reader)

    def _endpoint(self) -> AbstractAsyncContextManager[None]:
        """Answers agents beside the samples of the run, where the settings ask for it."""
        config, rollout = self._job.config, self._job.config.rollout
        return endpoint(
            self._ctx, rollout.endpoint, self._engine, self._tokenizer, model_name=config.name,
            model_path=self._job.model_path, max_length=rollout.max_prompt_tokens + rollout.max_new_tokens,
            stop_token_ids=self._params(rollout.temperature).stop_token_ids,
            seeds=isinstance(self._engine, EmbeddedEngine), tells_experts=config.train.router_replay,
        )  # fmt: skip

    async def _open_beside(self) -> Engine | None:
        """The engine of evaluations beside the training, with a copy of the weights of its own."""
        evaluation = self._job.config.evaluation
        if evaluation is None or evaluation.every is None or self._ctx.rank:
            return None
        slots = await self._ctx.compute(self._build, evaluation.num_slots, evaluates=True)
        return EmbeddedEngine(slots, Share(self._generation, evaluation.share, self._generates).compute)

    async def _generation(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._ctx.working("generate", function, *args)

    def _generates(self) -> bool:
        stats = self._engine.stats()
        return stats.num_running + stats.num_waiting > 0

    def _build(
        self,
        num_slots: int,
        *,
        evaluates: bool,
        lent: Lent | None = None,
        sleeps: bool = False,
        tells_experts: bool = False,
    ) -> SlotEngine:
        """On the compute thread. Long enough for the rollout's responses, and an evaluation's if it has some. Over a model of its
        own, or the trainer's tensors."""
        config, rollout = self._job.config, self._job.config.rollout
        settle(config)
        model = (
            lent.model
            if lent is not None
            else load_model(
                self._job.model_path, dtype=config.model.dtype, device=self._job.device, attn=config.model.attn
            )
        )
        sets = config.evaluation.named_sets().values() if evaluates and config.evaluation is not None else ()
        most = max(rollout.max_new_tokens, *(each.max_new_tokens or 0 for each in sets), 0)
        length = rollout.max_prompt_tokens + most
        return slot_engine(
            model,
            num_slots=num_slots,
            max_length=length,
            fixed_shapes=config.deterministic,
            lent=lent,
            sleeps=sleeps,
            tells_experts=tells_experts,
        )

    @asynccontextmanager
    async def _follow(self) -> AsyncIterator[asyncio.Event]:
        """Serves every new version while the body runs; the event is set once the first one is proved."""
        if self._lent is None:
            async with follow(self._ctx, self._job, self.role, self._install) as first:
                yield first
            return
        first = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._flip(self._lent, first))
            try:
                yield first
            finally:
                task.cancel()

    async def _install(self, version: int, tensors: Mapping[str, Any]) -> None:
        async with self._installing:
            await self._engine.update_weights(version, tensors)

    async def _waking(self) -> None:
        """Requests that come to an engine that sleeps, as when a group is given out again while its step is trained already,
        are generated under the weights that it had."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._lent is not None:
                async with self._installing:
                    version = self._engine.version
                    await self._engine.update_weights(version, Flip(version))
                continue
            async with self._installing, self._newest_weights() as found:
                if found is not None and found[0] >= self._engine.version:
                    await self._engine.update_weights(*found)

    async def _flip(self, lent: Lent, first: asyncio.Event) -> None:
        """Each version is there when the trainer says so: its tensors are those that it committed."""
        version = -1
        while True:
            flip = await lent.newer_than(version)
            version = flip.version
            with self._ctx.span("load weights", beside="weights", version=version):
                await self._install(version, flip)
            await self._job.bus.call("proved", f"{self.role}.{self._ctx.rank}", version)
            first.set()

    # ---- leases -----------------------------------------------------------------------------------------------------

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        limit = self._most_groups(self._job.config.rollout.samples_per_prompt)
        while not self._ctx.stopping.is_set():
            while len(self._running) >= limit:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            with self._ctx.span("wait for a lease", beside="leases"):
                answer = await self._next(limit - len(self._running))
            if "grants" in answer:
                for grant in answer["grants"]:
                    lease = Lease(**{**grant, "have": {sample: reward for sample, reward, _ in grant["have"]}})
                    self._progress.begin((lease.group, lease.epoch))
                    self._running[lease.group, lease.epoch] = tasks.create_task(self._run_group(lease))
            elif "evaluate" in answer:
                with self._ctx.span("evaluate", beside="evaluation", version=answer["evaluate"]["version"]):
                    await self._evaluate(**answer["evaluate"])
            else:
                break
        for task in list(self._running.values()):
            task.cancel()

    def _most_groups(self, num_samples: int) -> int:
        """Prompt groups of so many samples to have in flight: one wave decodes, one waits."""
        return max(1, -(-2 * self._job.config.rollout.num_slots // num_samples))

    async def _next(self, room: int) -> dict[str, Any]:
        """The coordinator's next piece of work, or an end when this replica is asked to leave meanwhile."""
        asking = asyncio.create_task(self._job.bus.call("lease", room, self._held(), self._ctx.rank, deadline_s=POLL_S))
        try:
            await self._unless_leaving(asking)
            return asking.result() if asking.done() else {"end": True}
        finally:
            asking.cancel()

    async def _unless_leaving(self, task: asyncio.Task[Any]) -> None:
        """Until the task is done, or this replica is asked to leave."""
        leaving = asyncio.create_task(self._ctx.stopping.wait())
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()

    def _held(self) -> list[list[int]]:
        return [[group, epoch] for group, epoch in self._running]

    async def _renew(self) -> None:
        """Each lease lasts while its group comes further. Those the coordinator no longer grants are given up."""
        interval = self._job.config.rollout.lease_deadline_s / 4
        while True:
            await asyncio.sleep(interval)
            if self._running:
                await self._renew_those_further()

    async def _renew_those_further(self) -> None:
        rewards = self._rewards.stats()
        scored = (rewards.num_scored, rewards.num_errors, rewards.num_timed_out)
        further = self._progress.since_last(self._engine.progress(), scored)
        answer = await self._job.bus.call("renew", further, self._held())
        for group, epoch in answer["lost"]:
            task = self._running.get((group, epoch))
            if task is not None:
                task.cancel()

    async def _report(self) -> None:
        """Engine counters and waits, every few seconds; tokens are progress."""
        before: list[tuple[int, int]] = []
        while True:
            await asyncio.sleep(REPORT_S)
            stats = [engine.stats() for engine in (self._engine, self._beside) if engine is not None]
            made = [(each.tokens_generated, each.decode_steps) for each in stats]
            if made != before:
                before = made
                self._ctx.progress()
            told = {"engine": asdict(stats[0]), "waits_s": totals()}
            if isinstance(self._engine, Dispatcher):
                told["dispatch"] = asdict(self._engine.dispatch_stats())
            await self._ctx.report("metrics", told)

    # ---- one group --------------------------------------------------------------------------------------------------

    async def _run_group(self, lease: Lease) -> None:
        try:
            with self._ctx.span("generate", step=lease.step, group=lease.group):
                await self._fill(lease)
        except RowError as error:  # this prompt's own fault; the run goes on
            await self._job.bus.call("settle", lease.group, lease.epoch, "error", str(error))
        finally:
            try:  # in every case: a lease that was lost while its last samples were put has room left over
                await self._job.bus.call("abandon", lease.group, lease.epoch)
            finally:
                del self._running[lease.group, lease.epoch]
                self._progress.end((lease.group, lease.epoch))
                self._ctx.progress()

    async def _fill(self, lease: Lease) -> None:
        config = self._job.config
        row = await asyncio.to_thread(self._data.row, self._order.locate(lease.position).row)
        with self._progress.preparing((lease.group, lease.epoch)):
            prompt, media = await self._prompt(row, config.data)
        if media is not None and not lease.has_media:
            self._put_media(lease, media)
        rewards = dict(lease.have)
        rewards |= self._put_kept(lease, prompt)
        missing = [number for number in range(config.rollout.samples_per_prompt) if number not in rewards]
        params = self._params(config.rollout.temperature)
        tasks = {
            asyncio.create_task(self._generate_of(lease, self._request(lease, number, prompt, media, params))): number
            for number in missing
        }
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finished = sorted((tasks.pop(task), task.result()) for task in done)
                with (
                    self._ctx.span("reward", beside="reward", step=lease.step, group=lease.group),
                    self._progress.scoring((lease.group, lease.epoch)),
                ):
                    samples = await self._score(row, finished)
                if isinstance(samples, str):
                    await self._job.bus.call("settle", lease.group, lease.epoch, "error", samples)
                    return
                rewards |= {sample.number: sample.reward for sample in samples}
                if not tasks and config.rollout.filter == "zero_std" and len(set(rewards.values())) == 1:
                    await self._job.bus.call("settle", lease.group, lease.epoch, "filtered", "equal rewards")
                    return
                self._put(lease, prompt, samples)
                self._log(lease, row, samples)
        finally:
            for task in tasks:
                task.cancel()

    async def _prompt(self, row: Row, data: DataConfig) -> tuple[np.ndarray, MediaInputs | None]:
        """The prompt's tokens, int32 [T], and what its media became. RowError for a row that cannot be used."""
        most = self._job.config.rollout.max_prompt_tokens
        if not row.media:
            return render_prompt(self._tokenizer, row, data, most), None
        if self._media is None:
            raise RowError(
                f"{row.name}: prompt must be text without the media section, got {row.media[0]}. Set media=MediaConfig()"
            )
        return await self._media.prepare(row, data, most)

    def _request(
        self, lease: Lease, number: int, prompt: np.ndarray, media: MediaInputs | None, params: SamplingParams
    ) -> Request:
        seed = sample_seed(self._job.config.seed, "train", lease.position, number)
        rollout = self._job.config.rollout
        return Request(
            f"{lease.group}.{lease.epoch}/{number}", prompt, params, seed, media=media,
            on_new_weights=rollout.on_new_weights, interruptions=rollout.max_interruptions,
        )  # fmt: skip

    async def _generate_of(self, lease: Lease, request: Request) -> Completion:
        with self._progress.generating((lease.group, lease.epoch), request.id):
            return await self._generate(request)

    async def _generate(self, request: Request) -> Completion:
        """One whole sample: where new weights interrupt it, it is asked for again with what it has, prompt and media the same."""
        done = await self._engine.generate(request)
        while done.finish_reason == "interrupted":
            request = request.resumed(done)
            done = await self._engine.generate(request)
        return done

    def _params(self, temperature: float) -> SamplingParams:
        rollout = self._job.config.rollout
        stops = {self._tokenizer.eos_token_id, *self._tokenizer.convert_tokens_to_ids(list(rollout.stop))}
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=tuple(sorted(stop for stop in stops if stop is not None)),
        )

    async def _score(self, row: Row, finished: Sequence[tuple[int, Completion]]) -> list[Sample] | str:
        """Samples with their rewards, or why this group's reward failed."""
        items = [item_of(self._tokenizer, row, completion) for _, completion in finished]
        with self._ctx.work("reward", self._slowest_reward_s):
            results: Sequence[RewardResult] = await self._rewards.score(items)
        samples = []
        for (number, completion), result in zip(finished, results, strict=True):
            if result.score is None:
                return f"reward of {row.name}, sample {number}: {result.error}"
            samples.append(Sample(number, completion, result.score, result.details))
        return samples

    def _put_kept(self, lease: Lease, prompt: np.ndarray) -> dict[int, float]:
        """What the checkpoint that this run goes on from has of the group, on the bus again: sample -> reward."""
        kept = [each for each in self._kept.take(lease.group, lease.position, prompt) if each.sample not in lease.have]
        if kept:
            put_kept(self._job.bus, lease.ring, lease.group, lease.epoch, kept)
        return {each.sample: each.info[2] for each in kept}

    def _put_media(self, lease: Lease, media: MediaInputs) -> None:
        """Before the first sample, so that a group that is ready has its media."""
        columns = [Column(name, array.dtype.name, [array]) for name, array in media.arrays.items()]
        self._job.bus.put_media(lease.ring, lease.group, lease.epoch, columns, media.encoder_positions)

    def _put(self, lease: Lease, prompt: np.ndarray, samples: Sequence[Sample]) -> None:
        done = [sample.completion for sample in samples]
        columns = self._columns(prompt, done)
        info = [
            (len(prompt) + len(c.tokens), len(c.tokens), sample.reward, *_versions(c))
            for sample, c in zip(samples, done, strict=True)
        ]
        self._job.bus.put_samples(
            lease.ring, lease.group, lease.epoch, [sample.number for sample in samples], columns, info
        )

    def _columns(self, prompt: np.ndarray, done: Sequence[Completion]) -> list[Column]:
        """The base columns of some samples of a prompt."""
        mask_old = self._job.config.rollout.mask_old_tokens
        columns = [
            Column("tokens", "int32", [np.concatenate([prompt, c.tokens]).astype(np.int32) for c in done]),
            Column("loss_mask", "uint8", [loss_mask(c, mask_old) for c in done]),
            Column("rollout_log_probs", "float32", [c.log_probs for c in done]),
            Column("policy_versions", "int32", [c.policy_versions for c in done]),
        ]
        if self._job.config.train.router_replay:
            told = [c.routed_experts for c in done]
            nothing = np.zeros(0, next((each.dtype for each in told if each is not None), np.dtype(np.uint8)))
            arrays = [nothing if each is None else each for each in told]
            columns.append(Column(ROUTED, arrays[0].dtype.name, arrays))
        return columns

    def _log(self, lease: Lease, row: Row, samples: Sequence[Sample]) -> None:
        """The group's first sample, for people to read: one line in samples/step_N.jsonl."""
        first = next((sample for sample in samples if sample.number == 0), None)
        if first is None:
            return
        line = {
            "group": lease.group, "prompt": row.prompt, "label": row.label, "reward": first.reward,
            "response": self._tokenizer.decode(first.completion.tokens.tolist()), "details": dict(first.details),
            "finish_reason": first.completion.finish_reason, "versions": sorted(set(first.completion.policy_versions.tolist())),
        }  # fmt: skip
        path = self._ctx.run_dir / "samples" / f"step_{lease.step:06d}.jsonl"
        with JsonLines(path, what="samples") as lines:
            lines.write(line)

    # ---- evaluation -------------------------------------------------------------------------------------------------

    async def _evaluate(self, label: str, version: int) -> None:
        """With the engine itself, before and after the training: it has this version, and gets no other meanwhile."""
        num_slots = self._job.config.rollout.num_slots
        found = await self._evaluator.evaluate(self._engine, label, version, num_slots=num_slots)
        await self._job.bus.call("evaluated", label, found)

    async def _evaluate_beside(self) -> None:
        """Beside the training, with an engine whose weights change only here."""
        evaluation = self._job.config.evaluation
        if self._beside is None or evaluation is None:
            return
        slab: WeightSlab | None = None
        while True:
            answer = await self._job.bus.call("evaluation", deadline_s=POLL_S)
            if "evaluate" not in answer:
                return
            due = answer["evaluate"]
            label, version = due["label"], due["version"]
            if slab is None:
                slab = WeightSlab(self._ctx.segments.segment(SLAB, 0), self._job.config.num_weight_slots)
            place = {"attempt": due["attempt"], "version": version, "checksum": due["checksum"]}
            tensors = await asyncio.to_thread(functools.partial(slab.read, due["slot"], **place))
            await self._beside.update_weights(version, tensors)
            del tensors
            await self._job.bus.call("proved", EVALUATION_READER, version)
            with self._ctx.span("evaluate beside", beside="evaluation", version=version):
                found = await self._evaluator.evaluate(self._beside, label, version, num_slots=evaluation.num_slots)
            await self._job.bus.call("evaluated", label, found)


def loss_mask(completion: Completion, mask_old: bool) -> np.ndarray:
    """The tokens that the loss counts, uint8 [R]: all that a policy sampled, or with `mask_old` those of the newest weights that
    the sample saw."""
    versions = completion.policy_versions
    chosen = (versions == versions.max()) & (versions != NO_VERSION) if mask_old else versions != NO_VERSION
    return chosen.astype(np.uint8)


def _versions(completion: Completion) -> tuple[int, int]:
    """The oldest and the newest policy version among the tokens that a policy sampled."""
    versions = completion.policy_versions[completion.policy_versions != NO_VERSION]
    return (int(versions.min()), int(versions.max())) if len(versions) else (NO_VERSION, NO_VERSION)
