"""Evaluation: how well one policy version answers prompts that nobody trains on.

Owns what is asked (every set's prompts, each with its own sampling), the figures of a set, and the check that one version alone
answered. Does not own which version is due (the coordinator) or the engine, which is handed in.

    found = await evaluator.evaluate(engine, "version_20", 20, num_slots=16)
    found -> {"version": 20, "reward": 0.4, "num_prompts": 64, "sets": {"math": {"mean@4": 0.4, "pass@1": 0.4, "pass@4": 0.7}}}

Invariant: no sample of an evaluation reaches the bus; its seed comes from (run seed, set, prompt, sample), so that the same
weights give the same samples wherever and however often they are asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.models.media.inputs import MediaInputs
from rondo.roles.config import DataConfig, EvalSet, JobConfig
from rondo.roles.datasets import Row, RowError, Rows
from rondo.roles.rollout.engine import Completion, Engine, Request, SamplingParams
from rondo.roles.rollout.rewards import RewardItem, RewardPool
from rondo.roles.rollout.stops import Stops, whole_sample
from rondo.runtime.errors import RondoError

Prepare = Callable[[Row, DataConfig], Awaitable[tuple[np.ndarray, MediaInputs | None]]]


def sample_seed(run_seed: int, kind: str, position: int, sample: int) -> int:
    """63 bits from (run seed, position in the data order, sample): the same in every epoch, replica and attempt."""
    digest = hashlib.blake2b(f"{run_seed}/{kind}/{position}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples solves the prompt, 1 - C(n - c, k) / C(n, k), from n
    samples of which c did (Chen et al., Evaluating Large Language Models Trained on Code, 2021, equation 1)."""
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_solved + 1, num_samples + 1))


def ks_of(config: EvalSet) -> tuple[int, ...]:
    """The k that a set reports: those it names, else the powers of two up to its samples, and these."""
    if config.pass_at is not None:
        return config.pass_at
    powers = (1 << i for i in range(config.samples_per_prompt.bit_length()))
    return tuple(dict.fromkeys((*powers, config.samples_per_prompt)))


def figures(config: EvalSet, rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of a set whose prompts' samples got these rewards: `mean@n`, the mean reward of all n samples, and every `pass@k`."""
    n = config.samples_per_prompt
    found = {f"mean@{n}": float(np.mean(rewards))}
    solved = [sum(reward >= config.solved_from for reward in each) for each in rewards]
    for k in ks_of(config):
        found[f"pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for c in solved]))
    return found


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Asks the prompts of every set and scores the answers. `prepare` makes a row's tokens and media, or raises RowError;
    `params` are the rollout's sampling, of which each set changes some."""

    config: JobConfig
    sets: Mapping[str, Rows]
    tokenizer: Any
    stops: Stops
    rewards: RewardPool
    prepare: Prepare
    params: SamplingParams

    async def evaluate(self, engine: Engine, label: str, version: int, *, num_slots: int) -> dict[str, Any]:
        """Every set under exactly this version, which the engine has and keeps; one wave decodes, one waits."""
        assert self.config.evaluation is not None
        configs = self.config.evaluation.named_sets()
        room = asyncio.Semaphore(max(1, -(-2 * num_slots // max(c.samples_per_prompt for c in configs.values()))))

        async def one(name: str, index: int) -> list[float | str]:
            async with room:
                try:
                    return await self._prompt(engine, label, version, name, configs[name], index)
                except RowError as error:
                    return [str(error)] * configs[name].samples_per_prompt

        async with asyncio.TaskGroup() as tasks:
            asked = {
                name: [tasks.create_task(one(name, index)) for index in range(len(self.sets[name]))] for name in configs
            }
        found, unusable = {}, list[str]()
        for name, config in configs.items():
            scored = [task.result() for task in asked[name]]
            # Told, counted as no reward, and the run goes on.
            unusable += [failed[0] for each in scored if (failed := [why for why in each if isinstance(why, str)])]
            rewards = [[0.0 if isinstance(reward, str) else reward for reward in each] for each in scored]
            found[name] = {**figures(config, rewards), "num_prompts": len(rewards)}
        means = [found[name][f"mean@{config.samples_per_prompt}"] for name, config in configs.items()]
        result: dict[str, Any] = {
            "version": version, "reward": float(np.mean(means)),
            "num_prompts": sum(len(tasks) for tasks in asked.values()), "sets": found,
        }  # fmt: skip
        if unusable:
            result |= {"num_unusable": len(unusable), "first_unusable": unusable[0]}
        return result

    async def _prompt(
        self, engine: Engine, label: str, version: int, name: str, config: EvalSet, index: int
    ) -> list[float | str]:
        """The rewards of one prompt's samples, or why the reward of one failed."""
        row = await asyncio.to_thread(self.sets[name].row, index)
        prompt, media = await self.prepare(row, config.data or self.config.data)
        assert self.config.evaluation is not None
        kind = f"evaluation/{name}" if self.config.evaluation.sets else "evaluation"
        params = self._sampling(config)
        requests = [
            Request(
                f"{label}/{name}/{index}/{number}", prompt, params,
                sample_seed(self.config.seed, kind, index, number), kind="evaluation", media=media,
            )
            for number in range(config.samples_per_prompt)
        ]  # fmt: skip
        done = await asyncio.gather(*(whole_sample(engine, request, self.stops) for request in requests))
        others = {int(v) for completion in done for v in np.unique(completion.policy_versions)} - {version}
        if others:
            raise RondoError(
                f"the evaluation of version {version} must sample under that version alone, got tokens of {sorted(others)}. "
                "The engine took other weights meanwhile"
            )
        results = await self.rewards.score([item_of(self.tokenizer, row, completion) for completion in done])
        return [
            result.score if result.score is not None else f"reward of {row.name}, sample {number}: {result.error}"
            for number, result in enumerate(results)
        ]

    def _sampling(self, config: EvalSet) -> SamplingParams:
        rollout = self.params
        return SamplingParams(
            max_new_tokens=config.max_new_tokens or rollout.max_new_tokens,
            temperature=config.temperature,
            top_p=rollout.top_p if config.top_p is None else config.top_p,
            top_k=rollout.top_k if config.top_k is None else config.top_k,
            stop_token_ids=rollout.stop_token_ids,
        )


def item_of(tokenizer: Any, row: Row, completion: Completion) -> RewardItem:
    """What the reward function is told of one sample."""
    text = tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
    return RewardItem(response=text, label=row.label, prompt=row.prompt, metadata=row.metadata)
