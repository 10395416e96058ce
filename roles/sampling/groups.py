"""What becomes of a leased prompt group: from its row to samples on the bus.

Owns the way of each sample through workflow and reward, what is put, and how a group ends whose samples are not. Does not own
leases (`roles/rollout.py`), how samples are made (`workflow.py`, with an `Engine`) or scored (`roles/rewards/`).

    lease -> prompt, media -> workflow -> reward -> (filter) -> put        every group ends in exactly one of:
                  |              |           |          |      put of its n samples, settled as filtered or failed, error,
                error          error       failed    filtered  lease lost

A reward that fails, or is late, fails its sample alone: the sample is put without one, trains nothing, and its siblings count as
they are. A group in which fewer samples have a reward than its algorithm compares fails, and another prompt takes its place.

Invariant: a sample that was put is never generated again (a new lease names what is there). The media of a prompt are read,
decoded and processed once a group, by workers beside this process, when its lease begins; so what is looked ahead is bounded by
the leases in flight.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rondo.comm.bus.group import FINISH, FINISHES, RESPONSE, VERDICT
from rondo.comm.ring.records import Column
from rondo.models.media.inputs import MediaInputs
from rondo.roles.config import DataConfig
from rondo.roles.data.chat import Chat
from rondo.roles.data.cursor import Order
from rondo.roles.data.datasets import Row, RowError, Rows
from rondo.roles.data.media import MediaPool, originals_of
from rondo.roles.data.prompts import render_prompt, without_media_section
from rondo.roles.engines.engine import Completion, Engine, Request, SamplingParams, sample_seed
from rondo.roles.engines.stops import Stops, whole_sample
from rondo.roles.job import Job
from rondo.roles.resumed import KeptSamples, put_kept
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.pool import RewardPool, RewardResult, bounded
from rondo.roles.sampling.columns import NOTHING, columns_of, finish_of, in_parts, info_of, with_score, words_of
from rondo.roles.sampling.episode import Made
from rondo.roles.sampling.evaluation import limits_of, scored, shown, told_error
from rondo.roles.sampling.filters import Ended, equal_rewards, kept
from rondo.roles.sampling.given import Given
from rondo.roles.sampling.kept_turns import EpisodeCounts, KeptTurns
from rondo.roles.sampling.leases import Progress
from rondo.roles.sampling.single_turn import single_turn
from rondo.roles.sampling.teaching import Teaching
from rondo.roles.sampling.workflow import Client, Context, Workflow
from rondo.roles.streams import SOURCE, WORDS
from rondo.runtime.records.record import JsonLines
from rondo.runtime.worker.context import WorkerContext


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one prompt group. `have`: sample -> what an earlier lease has put of it; `has_media`: it has put the
    media; `row`: its own where rows are looked at, else that of its position."""

    group: int
    epoch: int
    step: int
    position: int
    ring: str
    have: Mapping[int, Ended]
    has_media: bool = False
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the workflow's with what its reward became; `verdict` is that before its length took anything off it."""

    made: Made
    result: RewardResult
    verdict: float | None


@dataclass
class PromptGroups:
    """Those of one replica. `order` says which row of `rows` stands at a lease's position, `kept` what a checkpoint has of it."""

    ctx: WorkerContext
    job: Job
    engine: Engine
    tokenizer: Any
    stops: Stops
    rows: Rows
    order: Order
    kept: KeptSamples
    rewards: RewardPool
    media: MediaPool | None
    progress: Progress
    keep: UserFunction | None = None
    workflow: Workflow = single_turn
    teaching: Teaching | None = None
    given: Given | None = None
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts, init=False)
    _rendering: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # a prompt at a time, beside the loop

    async def fill(self, lease: Lease) -> None:
        """Puts what is missing of a group, or settles it. RowError for a prompt that cannot be used."""
        config = self.job.config
        if self.given is not None:
            with self.progress.scoring((lease.group, lease.epoch)):
                await self.given.put(
                    self.job.bus, lease.ring, lease.group, lease.epoch, lease.step, has_media=lease.has_media
                )
            return
        key = (lease.group, lease.epoch)
        at = self.order.locate(lease.position).row if lease.row is None else lease.row
        row = await asyncio.to_thread(self.rows.row, at)
        with self.progress.preparing(key):
            kept = config.samples.keep and config.samples.keeps(lease.group)
            prompt, media = await self.prepare(row, config.data, (lease.step, lease.group) if kept else None)
        if self.teaching is not None:
            self.teaching.whose(row)  # a row without one is told before anything is sampled
        if media is not None and not lease.has_media:
            self._put_media(lease, media)
        ended = dict(lease.have) | self._put_kept(lease, prompt)
        every = set(range(config.rollout.samples_per_prompt))
        if ended.keys() >= every:
            return
        self.progress.made(key, len(ended))
        turns = None
        if self.workflow is not single_turn:
            turns = KeptTurns(self.ctx.run_dir, *key, every - ended.keys(), self.episodes)
            turns.keeps = getattr(self.workflow, "replays", False)
        params = self._params_of(row)
        context = Context(
            row, prompt, media, self.tokenizer, every - ended.keys(), limits_of(config, params.max_new_tokens),
            chat=Chat.of(self.tokenizer, row, config.data),
            look=None if self.media is None else functools.partial(self.media.behind, config.data),
            originals=originals_of(row, config.data, config.media),
            progress=functools.partial(self.progress.further, key),
            elsewhere=functools.partial(self.progress.elsewhere, key), turns=turns,
        )  # fmt: skip
        client = Client(
            context,
            lambda number: self._request(lease, number, prompt, media, params),
            functools.partial(self._generate_of, lease, turns),
            lambda name: self.engine.cancel(name),
        )
        with nullcontext() if turns is None else turns:
            await self._take_in(lease, row, context, client, ended)

    async def _take_in(self, lease: Lease, row: Row, context: Context, client: Client, ended: dict[int, Ended]) -> None:
        """Scores and puts what the workflow makes, beside the samples that have `ended` before."""
        key, every = (lease.group, lease.epoch), {*context.missing, *ended}
        errors, finished = list[str](), list[Made]()
        async with aclosing(context.samples(self.workflow, client)) as made:
            async for more in made:
                finished += more
                self.progress.made(key, len(more))
                if self._together and len(ended) + len(finished) < len(every):
                    continue  # they are scored together, or learn from each other
                with (
                    self.ctx.span("reward", beside="reward", step=lease.step, group=lease.group),
                    self.progress.scoring(key),
                ):
                    samples = await self._score(row, finished)
                ended |= {sample.made.number: _ended(sample) for sample in samples}
                errors += [
                    told_error(row, each.made.number, each.result.error) for each in samples if each.result.error
                ]
                if ended.keys() >= every and (outcome := await self._outcome(list(ended.values()), errors)) is not None:
                    rewards = [sample.reward for sample in ended.values()]
                    await self.job.bus.call("settle", lease.group, lease.epoch, *outcome, rewards)
                    return
                self._put(lease, row, samples, await self._taught(row, samples))
                self._log(lease, row, samples)
                finished.clear()

    async def _outcome(self, ended: Sequence[Ended], errors: Sequence[str]) -> tuple[str, str] | None:
        """What a group with these samples is settled as, and why; None where it is trained. Of errors the first is told."""
        config = self.job.config
        num_scored = sum(sample.reward is not None for sample in ended)
        least = min(len(ended), config.algorithm.min_group_size)
        if num_scored < least:
            why = errors[0] if errors else "under an earlier lease"
            return (
                "failed",
                f"{num_scored} of {len(ended)} samples have a reward, {least} must. The first that failed: {why}",
            )
        if config.rollout.filter == "zero_std" and equal_rewards(ended):
            return "filtered", "equal rewards, which rollout.filter leaves out"
        if self.keep is None:
            return None
        keeps, error = await kept(self.keep, ended)
        if error:
            return "failed", f"rollout.keep must decide of each prompt group, got: {error}"
        return None if keeps else ("filtered", "rollout.keep said no")

    async def prepare(
        self, row: Row, data: DataConfig, keep: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, MediaInputs | None]:
        """The prompt's tokens, int32 [T], and what its media became. RowError for a row that cannot be used."""
        most = self.job.config.rollout.max_prompt_tokens
        if not row.media:
            async with self._rendering:
                return await asyncio.to_thread(render_prompt, self.tokenizer, row, data, most), None
        if self.media is None:
            raise without_media_section(row)
        return await self.media.prepare(row, data, most, keep=keep)

    def _request(
        self, lease: Lease, number: int, prompt: np.ndarray, media: MediaInputs | None, params: SamplingParams
    ) -> Request:
        seed = sample_seed(self.job.config.seed, "train", lease.position, number)
        rollout = self.job.config.rollout
        return Request(
            f"{lease.group}.{lease.epoch}/{number}", prompt, params, seed, media=media,
            on_new_weights=rollout.on_new_weights, interruptions=rollout.max_interruptions,
        )  # fmt: skip

    async def _generate_of(self, lease: Lease, turns: KeptTurns | None, request: Request) -> Completion:
        if turns is not None and (kept := turns.sampled(request)) is not None:
            return kept
        with self.progress.generating((lease.group, lease.epoch), request.id):
            done = await self._generate(request)
        if turns is not None:
            turns.add(request, done)
        return done

    async def _generate(self, request: Request) -> Completion:
        return await whole_sample(self.engine, request, self.stops)

    def params(self, temperature: float) -> SamplingParams:
        rollout = self.job.config.rollout
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self.stops.ids,
        )

    def _params_of(self, row: Row) -> SamplingParams:
        """Those of training, as the row's source changes them."""
        params, sources = self.params(self.job.config.rollout.temperature), self.job.config.data.sources
        names = ("max_new_tokens", "top_p", "top_k") if sources else ()
        return replace(
            params, **{each: value for each in names if (value := getattr(sources[row.source], each)) is not None}
        )

    async def _score(self, row: Row, made: Sequence[Made]) -> list[Sample]:
        config = self.job.config
        names = config.components.keys() if config.compares_parts else ()
        if any(each.reward is not None and not each.details.keys() >= set(names) for each in made):
            raise RowError(
                f"{row.name}: rewards must come from reward.function with reward.components, got one of a turn"
            )
        most = self._params_of(row).max_new_tokens
        # Of a group one after the other, by workers of which each starts anew.
        slowest_s = 2 * config.reward.deadline_s * config.rollout.samples_per_prompt + self.ctx.load_s
        slowest_s += config.judged_s
        with self.ctx.work("reward", slowest_s):
            refs = originals_of(row, config.data, config.media)
            results = await scored(self.rewards, self.tokenizer, row, made, most, refs)
        return [self._sample(each, result, most) for each, result in zip(made, results, strict=True)]

    def _sample(self, made: Made, result: RewardResult, most: int) -> Sample:
        """With what its length takes off its reward."""
        config, verdict = self.job.config, result.score
        taken = config.reward.overlong(len(made.last.tokens), most)
        if taken and result.score is not None:
            result = replace(result, score=result.score - taken, details=result.details | {"overlong": -taken})
            result = bounded(result, "a reward without reward.overlong_penalty")
        if config.algorithm.by_turn and result.score is not None:
            made = with_score(made, result.score)
        return Sample(made, result, verdict)

    def _put_kept(self, lease: Lease, prompt: np.ndarray) -> dict[int, Ended]:
        """What the checkpoint that this run goes on from has of the group, on the bus again, by sample."""
        found = [each for each in self.kept.take(lease.group, lease.position, prompt) if each.sample not in lease.have]
        if found:
            put_kept(self.job.bus, lease.ring, lease.group, lease.epoch, found)
        ended = dict[int, Ended]()
        for each in found:
            before = ended[each.sample].num_tokens if each.part else 0
            ended[each.sample] = told_of(each.info[VERDICT], before + int(each.info[RESPONSE] or 0), each.info[FINISH])
        return ended

    def _put_media(self, lease: Lease, media: MediaInputs) -> None:
        """Before the first sample, so that a group that is ready has its media."""
        columns = [Column(name, array.dtype.name, [array]) for name, array in media.arrays.items()]
        self.job.bus.put_media(lease.ring, lease.group, lease.epoch, columns, media.encoder_positions)

    @property
    def _together(self) -> bool:
        config = self.job.config
        judged = config.genrm is not None and config.genrm.per != "response"
        return config.reward.per == "group" or judged or (self.teaching is not None and self.teaching.sees_siblings)

    async def _taught(self, row: Row, samples: Sequence[Sample]) -> list[Column]:
        sources = list(self.job.config.data.sources)
        at = [np.array([sources.index(row.source)], np.uint8)] if sources else []
        found = [Column(SOURCE, "uint8", at * len(samples))] if at else []
        if self.teaching is None:
            return found
        return found + await self.teaching.columns(
            row, [each.made.last for each in samples], [each.result for each in samples]
        )

    def _put(self, lease: Lease, row: Row, samples: Sequence[Sample], taught: Sequence[Column]) -> None:
        made = [sample.made for sample in samples]
        order, keeps = in_parts(made), self.job.config.samples
        rows = [made[at].rows[part] for at, part in order]
        columns = columns_of(self.job.config, made, [sample.result for sample in samples])
        columns += [Column(each.name, each.dtype, [each.arrays[at] for at, _ in order]) for each in taught]
        if keeps.keep:
            kept = keeps.keeps(lease.group)
            words = [
                words_of(
                    row, samples[at].result, keeps.text_bytes, self.tokenizer.decode(part.completion.tokens.tolist())
                )
                if kept
                else NOTHING
                for (at, _), part in zip(order, rows, strict=True)
            ]
            columns.append(Column(WORDS, "uint8", words))
        told = [(finish_of(sample.made.last), sample.result.score, sample.verdict) for sample in samples]
        info = [info_of(row, *told[at]) for row, (at, _) in zip(rows, order, strict=True)]
        numbers, parts = [each.number for each in made], [len(each.rows) for each in made]
        self.job.bus.put_samples(lease.ring, lease.group, lease.epoch, numbers, columns, info, parts)

    def _log(self, lease: Lease, row: Row, samples: Sequence[Sample]) -> None:
        """The group's first sample, and every one that failed, for people to read: a line each in samples/step_N.jsonl."""
        path = self.ctx.run_dir / "samples" / f"step_{lease.step:06d}.jsonl"
        chosen = [sample for sample in samples if sample.made.number == 0 or sample.result.error]
        if chosen:
            with JsonLines(path, what="samples") as file:
                for each in chosen:
                    line = shown(self.tokenizer, row, each.made, each.result)
                    file.write({"group": lease.group, "sample": each.made.number, **line})


def told_of(reward: Any, response: Any, finish: Any) -> Ended:
    """What the coordinator, or a checkpoint, has of a sample that was put."""
    return Ended(reward, FINISHES[int(finish)], int(response))


def _ended(sample: Sample) -> Ended:
    return Ended(sample.verdict, finish_of(sample.made.last), sample.made.num_tokens)
