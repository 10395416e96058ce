"""What becomes of a leased prompt group: from its row to samples on the bus.

Owns the way of each sample through engine and reward, what is put, and how a group ends whose samples are not. Does not own
leases (`role.py`), how tokens are made (an `Engine`) or scored (`rewards.py`).

    lease -> prompt, media -> engine -> reward -> (filter) -> put          every group ends in exactly one of:
                                   |          |         put of its n samples, settled as filtered, error, lease lost
                                 error     filtered

Invariant: a sample that was put is never generated again (a new lease names what is there). The media of a prompt are read,
decoded and processed once a group, by workers beside this process, when its lease begins; so what is looked ahead is bounded by
the leases in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.comm.records import Column
from rondo.models.media.inputs import MediaInputs
from rondo.roles.config import DataConfig
from rondo.roles.cursor import Order
from rondo.roles.datasets import Row, Rows
from rondo.roles.job import Job
from rondo.roles.kept import KeptSamples, put_kept
from rondo.roles.media import MediaPool
from rondo.roles.prompts import render_prompt, without_media_section
from rondo.roles.rollout.columns import columns_of, info_of
from rondo.roles.rollout.engine import Completion, Engine, Request, SamplingParams
from rondo.roles.rollout.evaluation import item_of, sample_seed
from rondo.roles.rollout.leases import Progress
from rondo.roles.rollout.rewards import RewardPool, RewardResult
from rondo.roles.rollout.stops import Stops, whole_sample
from rondo.runtime.context import WorkerContext
from rondo.runtime.record import JsonLines
from rondo.runtime.values import as_json


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

    async def fill(self, lease: Lease) -> None:
        """Puts what is missing of a group, or settles it. RowError for a prompt that cannot be used."""
        config = self.job.config
        row = await asyncio.to_thread(self.rows.row, self.order.locate(lease.position).row)
        with self.progress.preparing((lease.group, lease.epoch)):
            prompt, media = await self.prepare(row, config.data)
        if media is not None and not lease.has_media:
            self._put_media(lease, media)
        rewards = dict(lease.have)
        rewards |= self._put_kept(lease, prompt)
        missing = [number for number in range(config.rollout.samples_per_prompt) if number not in rewards]
        params = self.params(config.rollout.temperature)
        tasks = {
            asyncio.create_task(self._generate_of(lease, self._request(lease, number, prompt, media, params))): number
            for number in missing
        }
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finished = sorted((tasks.pop(task), task.result()) for task in done)
                with (
                    self.ctx.span("reward", beside="reward", step=lease.step, group=lease.group),
                    self.progress.scoring((lease.group, lease.epoch)),
                ):
                    samples = await self._score(row, finished)
                if isinstance(samples, str):
                    await self.job.bus.call("settle", lease.group, lease.epoch, "error", samples)
                    return
                rewards |= {sample.number: sample.reward for sample in samples}
                if not tasks and config.rollout.filter == "zero_std" and len(set(rewards.values())) == 1:
                    await self.job.bus.call(
                        "settle", lease.group, lease.epoch, "filtered", "equal rewards, which rollout.filter leaves out"
                    )
                    return
                self._put(lease, prompt, samples)
                self._log(lease, row, samples)
        finally:
            for task in tasks:
                task.cancel()

    async def prepare(self, row: Row, data: DataConfig) -> tuple[np.ndarray, MediaInputs | None]:
        """The prompt's tokens, int32 [T], and what its media became. RowError for a row that cannot be used."""
        most = self.job.config.rollout.max_prompt_tokens
        if not row.media:
            return render_prompt(self.tokenizer, row, data, most), None
        if self.media is None:
            raise without_media_section(row)
        return await self.media.prepare(row, data, most)

    def _request(
        self, lease: Lease, number: int, prompt: np.ndarray, media: MediaInputs | None, params: SamplingParams
    ) -> Request:
        seed = sample_seed(self.job.config.seed, "train", lease.position, number)
        rollout = self.job.config.rollout
        return Request(
            f"{lease.group}.{lease.epoch}/{number}", prompt, params, seed, media=media,
            on_new_weights=rollout.on_new_weights, interruptions=rollout.max_interruptions,
        )  # fmt: skip

    async def _generate_of(self, lease: Lease, request: Request) -> Completion:
        with self.progress.generating((lease.group, lease.epoch), request.id):
            return await self._generate(request)

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

    async def _score(self, row: Row, finished: Sequence[tuple[int, Completion]]) -> list[Sample] | str:
        """Samples with their rewards, or why this group's reward failed."""
        items = [item_of(self.tokenizer, row, completion) for _, completion in finished]
        config = self.job.config
        # Of a group one after the other, by workers of which each starts anew.
        slowest_s = 2 * config.reward.deadline_s * config.rollout.samples_per_prompt + self.ctx.load_s
        with self.ctx.work("reward", slowest_s):
            results: Sequence[RewardResult] = await self.rewards.score(items)
        samples = []
        for (number, completion), result in zip(finished, results, strict=True):
            if result.score is None:
                return f"reward of {row.name}, sample {number}: {result.error}"
            samples.append(Sample(number, completion, result.score, result.details))
        return samples

    def _put_kept(self, lease: Lease, prompt: np.ndarray) -> dict[int, float]:
        """What the checkpoint that this run goes on from has of the group, on the bus again: sample -> reward."""
        kept = [each for each in self.kept.take(lease.group, lease.position, prompt) if each.sample not in lease.have]
        if kept:
            put_kept(self.job.bus, lease.ring, lease.group, lease.epoch, kept)
        return {each.sample: each.info[2] for each in kept}

    def _put_media(self, lease: Lease, media: MediaInputs) -> None:
        """Before the first sample, so that a group that is ready has its media."""
        columns = [Column(name, array.dtype.name, [array]) for name, array in media.arrays.items()]
        self.job.bus.put_media(lease.ring, lease.group, lease.epoch, columns, media.encoder_positions)

    def _put(self, lease: Lease, prompt: np.ndarray, samples: Sequence[Sample]) -> None:
        columns = self._columns(prompt, [sample.completion for sample in samples])
        info = [info_of(prompt, sample.completion, sample.reward) for sample in samples]
        numbers = [sample.number for sample in samples]
        self.job.bus.put_samples(lease.ring, lease.group, lease.epoch, numbers, columns, info)

    def _columns(self, prompt: np.ndarray, done: Sequence[Completion]) -> list[Column]:
        return columns_of(self.job.config, prompt, done)

    def _log(self, lease: Lease, row: Row, samples: Sequence[Sample]) -> None:
        """The group's first sample, for people to read: one line in samples/step_N.jsonl."""
        first = next((sample for sample in samples if sample.number == 0), None)
        if first is None:
            return
        line = {
            "group": lease.group, "prompt": as_json(row.prompt), "label": as_json(row.label), "reward": first.reward,
            "response": self.tokenizer.decode(first.completion.tokens.tolist()), "details": as_json(first.details),
            "finish_reason": first.completion.finish_reason, "versions": sorted(set(first.completion.policy_versions.tolist())),
        }  # fmt: skip
        path = self.ctx.run_dir / "samples" / f"step_{lease.step:06d}.jsonl"
        with JsonLines(path, what="samples") as lines:
            lines.write(line)
