"""rollout: leases in, settled prompt groups out.

Owns the concurrency of a replica: how many groups are in flight, what is renewed and given up, and when it evaluates. Does not
own which prompt comes next (the coordinator admits, `cursor.py` orders), what becomes of a group (`groups.py`), or the engine and
its weights (`replica.py`).

Invariant: a group whose lease is lost puts nothing more and gives its reservation back.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from typing import Any

from rondo.comm.bus.bus import POLL_S
from rondo.comm.bus.versions import EVALUATION_READER
from rondo.comm.weights.slab import WeightSlab
from rondo.models.device_memory import device_memory
from rondo.models.load import load_tokenizer
from rondo.roles.config import JobConfig
from rondo.roles.data.cursor import Order
from rondo.roles.data.datasets import RowError, Rows, open_splits, train_order
from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.data.media import MediaPool
from rondo.roles.data.next_rows import next_rows
from rondo.roles.data.prompts import TooLong
from rondo.roles.engines.calls import EngineCalls
from rondo.roles.engines.dispatch.dispatcher import Dispatcher
from rondo.roles.engines.embedded.embedded import EmbeddedEngine
from rondo.roles.engines.engine import Engine
from rondo.roles.engines.rates import Rates
from rondo.roles.engines.replica import ROLE, Replica
from rondo.roles.engines.stops import stops_of
from rondo.roles.forward import REPORT_S
from rondo.roles.job import SLAB, Job, open_job
from rondo.roles.resumed import KeptSamples
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.genrm import Genrm, Records
from rondo.roles.rewards.pool import RewardPool
from rondo.roles.rewards.scorer import Scorer
from rondo.roles.sampling.agents import Agents
from rondo.roles.sampling.environments import Environments
from rondo.roles.sampling.evaluation import SET, Evaluator, Part, result
from rondo.roles.sampling.given import Given
from rondo.roles.sampling.groups import Lease, PromptGroups, told_of
from rondo.roles.sampling.leases import Progress
from rondo.roles.sampling.predict import Predictor
from rondo.roles.sampling.single_turn import single_turn
from rondo.roles.sampling.teaching import Teaching
from rondo.roles.sampling.workflow import open_workflow
from rondo.roles.serve.endpoint import endpoint
from rondo.roles.streams import base_columns
from rondo.runtime.sandbox.sandbox import use
from rondo.runtime.waits import totals, until
from rondo.runtime.worker.context import WorkerContext

_ENGINES_S = 2.0
_YOUNG = 10_000
"""Objects between two looks for garbage: what an episode holds lives for longer, and to walk it over and over takes its time."""
_FILTER_S = 120.0
"""For rows that are looked at together: a second's, and the one that was begun."""


class RolloutRole:
    role = ROLE
    open_replica = Replica
    open_groups = PromptGroups
    keeps_all = False
    """Whether every sample of an evaluation is written down, and not the first of each prompt."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        # By (group, epoch): a group whose lease was lost can come back here before its old task has ended.
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._fewer = asyncio.Event()
        """A group has ended, or a sample left its place at the engine."""
        self._left_out = set[str]()

    async def run(self) -> None:
        ctx = self._ctx
        self._job = job = await self._open_job()
        config, limits = job.config, job.config.reward
        use(config.sandbox.settings)  # and so do the processes of rewards and tools
        self._judges = judges = dict[str, Genrm | Scorer]()
        if config.genrm is not None:
            judges["genrm"] = Genrm(
                config.genrm, Records(ctx.run_dir, "genrm"), seed=config.seed, num_workers=limits.num_workers,
                deadline_s=limits.deadline_s, load_deadline_s=ctx.load_s,
            )  # fmt: skip
        if config.scorer is not None:
            judges["scorer"] = Scorer(config.scorer, Records(ctx.run_dir, "scorer"))
        self._progress = Progress(limits.deadline_s + config.judged_s, left=self._fewer.set)
        self._rewards = RewardPool(
            limits.function, by=limits.by, args=limits.args, per=limits.per, components=limits.components,
            num_workers=limits.num_workers,
            deadline_s=limits.deadline_s, load_deadline_s=ctx.load_s,
            judges=[(judge, judge.config.weight) for judge in judges.values()],
        )  # fmt: skip
        own = config.evaluation.named_sets() if config.evaluation is not None else {}
        own_rewards = {name: each.reward for name, each in own.items() if each.reward is not None}
        checkers = None
        if own_rewards:
            checkers = RewardPool(own_rewards, by=SET, deadline_s=limits.deadline_s, load_deadline_s=ctx.load_s)
        media, samples = None, config.samples
        if config.media is not None:
            kept_media = (ctx.run_dir, samples.media_bytes) if samples.keep and samples.media_bytes else None
            media = MediaPool(job.model_path, config.media, load_deadline_s=ctx.load_s, originals=kept_media)
        keep = None
        if config.rollout.keep is not None:
            keep = UserFunction(
                "rondo.roles.sampling.filters:open_keep", {"function": config.rollout.keep}, work="filter",
                source="rollout.keep", deadline_s=limits.deadline_s, load_deadline_s=ctx.load_s,
            )  # fmt: skip
        contexts = None
        if config.distillation is not None and config.distillation.context is not None:
            contexts = UserFunction(
                "rondo.roles.sampling.teaching:open_context", {"function": config.distillation.context}, work="context",
                source="distillation.context", deadline_s=limits.deadline_s, load_deadline_s=ctx.load_s,
            )  # fmt: skip
        environments = None
        if config.rollout.environment is not None:
            environments = Environments(config, load_deadline_s=ctx.load_s)
        agents = None if config.rollout.agent is None else Agents(config, job.model_path, ctx.rt_dir)
        self._environments = agents or environments
        self._replica = replica = self.open_replica(ctx, job)
        async with AsyncExitStack() as pools:
            # Their workers take seconds to import what they need: meanwhile this process loads the model, or servers do.
            async with asyncio.TaskGroup() as opening:
                for pool in (self._rewards, checkers, media, keep, contexts, environments):
                    if pool is not None:
                        opening.create_task(pools.enter_async_context(pool))
                starting_s = 0.0 if config.rollout.sglang is None else config.rollout.sglang.start_deadline_s
                with ctx.section("load", ctx.load_s + starting_s):
                    tokenizer = await ctx.compute(load_tokenizer, job.model_path)
                    stops = stops_of(job.model_path, tokenizer, config.rollout.stop, config.rollout.max_new_tokens)
                    rows, order, held_out = await ctx.compute(self._open_data, config)
                    if environments is not None:
                        workflow = environments.workflow(tokenizer)
                    elif agents is not None:
                        workflow = agents
                    else:
                        workflow = await ctx.compute(open_workflow, config.rollout.workflow)
                    checkpoints = ctx.run_dir / "checkpoints"
                    kept = await asyncio.to_thread(KeptSamples.of_newest, checkpoints, base_columns(config))
                    await replica.open(pools)
                    self._groups = groups = self.open_groups(
                        ctx, job, replica.engine, tokenizer, stops, rows, order, kept, self._rewards,
                        media, self._progress, keep, workflow,
                        None if config.distillation is None else Teaching(config, tokenizer, contexts),
                        None if (of := config.debug.train_only) is None else Given(of, config),
                    )  # fmt: skip
                    params = groups.params(config.rollout.temperature)
                    self._evaluator = Evaluator(
                        config, held_out, tokenizer, stops, self._rewards, groups.prepare, params, workflow,
                        None if media is None else media.behind, ctx.run_dir / "samples", self.keeps_all, checkers,
                    )  # fmt: skip
            async with replica.follow() as first:
                await first.wait()
                await pools.enter_async_context(self._endpoint())
                if agents is not None:
                    await pools.enter_async_context(agents.serving(ctx, replica.engine, tokenizer, stops))
                ctx.offer(EngineCalls(replica))
                ctx.offer(Predictor(self._evaluator, replica.engine))
                gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
                await ctx.ready()
                async with asyncio.TaskGroup() as tasks:
                    others = (self._renew(), self._report(), self._tell_of_engines(), replica.waking())
                    beside = [tasks.create_task(each) for each in others]
                    evaluating = tasks.create_task(self._evaluate_beside())
                    await self._work(tasks)
                    if not ctx.stopping.is_set():
                        await self._unless_leaving(evaluating)
                    for task in (*beside, evaluating):
                        task.cancel()
            if told := self._asked():
                await ctx.report("metrics", told | {"rank": ctx.rank})
        await replica.close()

    async def _open_job(self) -> Job:
        return await open_job(self._ctx)

    def _open_data(self, config: JobConfig) -> tuple[Rows, Order, Mapping[str, Rows]]:
        """What prompt groups are of, in which order, and what is evaluated on."""
        rows, held_out = open_splits(config, Fingerprints.of_run(self._ctx.run_dir))
        return rows, train_order(config, rows), held_out

    def _endpoint(self) -> AbstractAsyncContextManager[None]:
        """Answers agents beside the samples of the run, where the settings ask for it."""
        config, rollout, groups = self._job.config, self._job.config.rollout, self._groups
        return endpoint(
            self._ctx, rollout.endpoint, self._replica.engine, groups.tokenizer, model_name=config.name,
            model_path=self._job.model_path, max_length=rollout.max_prompt_tokens + rollout.max_new_tokens,
            stop_token_ids=groups.stops.ids,
            seeds=isinstance(self._replica.engine, EmbeddedEngine), tells_experts=config.train.router_replay == "r3",
        )  # fmt: skip

    # ---- leases -----------------------------------------------------------------------------------------------------

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while not self._ctx.stopping.is_set():
            await until(self._fewer, lambda: self._room() > 0)
            with self._ctx.span("wait for a lease", beside="leases"):
                answer = await self._next(self._room())
            if "grants" in answer:
                for grant in answer["grants"]:
                    lease = Lease(**{**grant, "have": {sample: told_of(*told) for sample, *told in grant["have"]}})
                    self._progress.begin((lease.group, lease.epoch))
                    self._running[lease.group, lease.epoch] = tasks.create_task(self._run_group(lease))
                await asyncio.sleep(
                    0
                )  # each begins: a task that is cancelled before its first step never gives its lease back
            elif "look" in answer:
                await self._look(**answer["look"])
            elif "evaluate" in answer:
                with self._ctx.span("evaluate", beside="evaluation", version=answer["evaluate"]["version"]):
                    evaluating = tasks.create_task(self._evaluate(**answer["evaluate"]))
                    await self._unless_leaving(evaluating)
                    evaluating.cancel()  # of one that leaves
            else:
                break
        for task in list(self._running.values()):
            task.cancel()

    async def _look(self, position: int, numbers: dict[str, int]) -> None:
        """Tells the coordinator of which sources the positions from this one on are, and which rows of its own come next."""
        groups, config = self._groups, self._job.config
        order, most = groups.order, config.rollout.prompts_per_step + config.rollout.spare_groups
        (source, number), *_ = sources = [order.source_at(each) for each in range(position, position + most)]
        number = numbers.get(source, number)
        with self._ctx.section("data.filter", _FILTER_S):
            found = await asyncio.to_thread(
                next_rows, groups.rows, order, source, number, most, filtered=config.data.filters
            )
        await self._job.bus.call("looked_at", position, sources, source, number, found, order.num_rows_of(source))

    def _room(self) -> int:
        """Prompt groups to ask for. Of samples at the engine one wave decodes and one waits; those that are whole, or elsewhere
        (with an environment, a tool, a program), leave their places to others, as far as `rollout.max_episodes` goes."""
        rollout, agent = self._job.config.rollout, self._job.config.rollout.agent
        size, held = rollout.samples_per_prompt, len(self._running)
        room = max(1, -(-2 * self._replica.num_slots // size)) - held + self._progress.num_away // size
        most = rollout.max_episodes or (None if agent is None else 2 * agent.max_processes)
        return room if most is None else min(room, max(1, most // size) - held)

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
        judged = (judge.stats().answers for judge in self._judges.values())
        scored = (rewards.num_scored, rewards.num_errors, rewards.num_timed_out, *judged)
        further = self._progress.since_last(self._replica.engine.progress(), scored)
        answer = await self._job.bus.call("renew", further, self._held())
        for group, epoch in answer["lost"]:
            task = self._running.get((group, epoch))
            if task is not None:
                task.cancel()

    async def _report(self) -> None:
        """Engine counters and waits, every few seconds; tokens are progress."""
        before: list[tuple[int, int]] = []
        servers, device = self._job.config.rollout.sglang, self._job.device
        rates = Rates(1 if servers is None else servers.num_devices)
        while True:
            await asyncio.sleep(REPORT_S)
            stats = [engine.stats() for engine in (self._replica.engine, self._replica.beside) if engine is not None]
            made = [(each.tokens_generated, each.decode_steps) for each in stats]
            if made != before:
                before = made
                self._ctx.progress()
            told = {"engine": asdict(stats[0]) | rates.since(stats[0]), "waits_s": totals(), "rank": self._ctx.rank}
            told |= device_memory(device) if servers is None else {}
            if isinstance(self._replica.engine, Dispatcher):
                told["dispatch"] = asdict(self._replica.engine.dispatch_stats())
            await self._ctx.report("metrics", told | self._asked())

    def _asked(self) -> dict[str, Any]:
        """Counters of the judge, of environments and of episodes."""
        environments = self._environments
        told: dict[str, Any] = {name: asdict(judge.stats()) for name, judge in self._judges.items()}
        if environments is not None:
            told["environments"] = {name: asdict(each) for name, each in environments.stats().items()}
        if self._groups.workflow is not single_turn:
            told["episodes"] = asdict(self._groups.episodes)
        return told

    async def _tell_of_engines(self) -> None:
        """How many are healthy, to whoever knows how many must be."""
        while True:
            engines = [each for each in self._replica.engines() if "healthy" in each]
            healthy = sum(each["healthy"] for each in engines)
            await self._job.bus.call("engines", self._ctx.rank, healthy, len(engines))
            await asyncio.sleep(_ENGINES_S)

    async def _run_group(self, lease: Lease) -> None:
        try:
            with self._ctx.span("generate", step=lease.step, group=lease.group):
                await self._groups.fill(lease)
        except TooLong as error:  # it stays so: no other try
            await self._job.bus.call("settle", lease.group, lease.epoch, "filtered", str(error))
            if (why := str(error)) not in self._left_out:  # in another pass it is the same row
                self._left_out.add(why)
                await self._ctx.report("left_out", {"why": why})
        except RowError as error:  # this prompt's own fault; the run goes on
            await self._job.bus.call("settle", lease.group, lease.epoch, "error", str(error))
        finally:
            try:  # in every case: a lease that was lost while its last samples were put has room left over
                await self._job.bus.call("abandon", lease.group, lease.epoch)
            finally:
                del self._running[lease.group, lease.epoch]
                self._progress.end((lease.group, lease.epoch))
                self._ctx.progress()

    # ---- evaluation -------------------------------------------------------------------------------------------------

    async def _evaluate(self, label: str, version: int, part: int, of: int, parts: list[Part] | None = None) -> None:
        """With the engine itself, before and after the training: it has this version, and gets no other meanwhile. `parts` are
        there where all prompts were asked."""
        if parts is not None:
            await self._job.bus.call("evaluated", label, self._result(version, parts))
            return
        found = await self._evaluator.evaluate(
            self._replica.engine, label, version, num_slots=self._replica.num_slots, part=part, of=of
        )
        await self._job.bus.call("evaluated_part", label, part, found)

    def _result(self, version: int, parts: list[Part], names: Sequence[str] = ()) -> dict[str, Any]:
        assert self._job.config.evaluation is not None
        sets = self._job.config.evaluation.named_sets()
        return result({name: sets[name] for name in names or sets}, version, parts)

    async def _evaluate_beside(self) -> None:
        """Beside the training, with an engine whose weights change only here."""
        if not self._replica.evaluates:
            return
        slab: WeightSlab | None = None
        while True:
            answer = await self._job.bus.call("evaluation", deadline_s=POLL_S)
            if "evaluate" not in answer:
                return
            due = answer["evaluate"]
            if slab is None:
                slab = WeightSlab(self._ctx.segments.segment(SLAB, 0), self._job.config.num_weight_slots)
            try:
                if self._replica.beside is None:
                    await self._job.bus.call("let_go", EVALUATION_READER)  # the trainer may need the slot meanwhile
                    await self._replica.open_beside()
                    continue
                found = await self._evaluated_beside(self._replica.beside, slab, **due)
            except Exception as error:
                if "sets" not in due:
                    raise
                # What somebody asked for fails alone: the run goes on.
                await self._job.bus.call("let_go", EVALUATION_READER)
                found = {"version": due["version"], "skipped": f"{type(error).__name__}: {error}"}
            await self._job.bus.call("evaluated", due["label"], found)

    async def _evaluated_beside(
        self, engine: Engine, slab: WeightSlab, label: str, version: int, slot: int, checksum: int, attempt: int,
        sets: Sequence[str] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """The result of these sets, of all without, under the version that lies there."""
        assert self._job.config.evaluation is not None
        read = functools.partial(slab.read, slot, attempt=attempt, version=version, checksum=checksum)
        await engine.update_weights(version, await asyncio.to_thread(read))
        await self._job.bus.call("proved", EVALUATION_READER, version)
        with self._ctx.span("evaluate beside", beside="evaluation", version=version):
            part = await self._evaluator.evaluate(
                engine, label, version, num_slots=self._job.config.evaluation.num_slots, names=sets
            )
        return self._result(version, [part], sets)
