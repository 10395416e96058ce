"""A run with roles, advantages and a loss of its own, in which one role after another is the slowest, for PER steps each.

`python -m tests.e2e.slowed FOLDER`
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from rondo.launch import train
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.launch.train import TrainOptions
from rondo.models.config import ModelConfig
from rondo.roles.actor import ActorRole
from rondo.roles.algorithms.losses import Batch
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.forward import ActorForwardRole, ReferenceRole
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease, PromptGroups
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective

NAME = "slowed"
ORDER = ("rollout", "reward", "reference", "actor_fwd", "actor")
PER = 4
SLOW_S = 0.5
"""Of a prompt group, or a round: many times what the others take for one, also where other programs take the cores."""
_step: ContextVar[int] = ContextVar("step")


def slow_at(step: int) -> str:
    """Nobody in the first steps, in which libraries do for the first time what they do quicker later."""
    return ("", *ORDER)[min(step // PER, len(ORDER))]


def steps_of(role: str) -> str:
    """As `rondo explain --steps` takes them: those that no other slow role reaches into."""
    first = PER * (1 + ORDER.index(role))
    return f"{first + 2}:{first + PER}"


def by_token(rewards: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.full(len(mask), reward) for reward, mask in zip(rewards - 0.5, masks, strict=True)])


def plain(batch: Batch, algorithm: AlgorithmConfig) -> Any:
    return -batch.log_probs * batch.advantages, {"own_entropy": batch.entropy}


class SlowGroups(PromptGroups):
    async def fill(self, lease: Lease) -> None:
        _step.set(lease.step)
        await super().fill(lease)

    def _is(self, what: str) -> bool:
        return slow_at(_step.get()) == what

    async def _generate(self, request: Request) -> Completion:
        if self._is("rollout"):
            await asyncio.sleep(SLOW_S)
        return await super()._generate(request)

    async def _score(self, row: Any, finished: Any) -> Any:
        if self._is("reward"):
            await asyncio.sleep(SLOW_S)
        return await super()._score(row, finished)


class SlowRollout(RolloutRole):
    open_groups = SlowGroups


class _SlowForward:
    _ctx: Any

    def _open_scorer(self, path: str, job: Any) -> Any:
        scorer = super()._open_scorer(path, job)  # type: ignore[misc]
        span, of = self._ctx.span, dict[str, int]()
        role, score = self._ctx.role, scorer.score

        def noting(name: str, **told: Any) -> Any:
            if name == "forward":
                of["step"] = told["step"]
            return span(name, **told)

        def slowly(rows: Sequence[Any], **asked: Any) -> Any:
            if slow_at(of["step"]) == role:
                time.sleep(SLOW_S)
            return score(rows, **asked)

        self._ctx.span, scorer.score = noting, slowly
        return scorer


class SlowReference(_SlowForward, ReferenceRole): ...


class SlowActorForward(_SlowForward, ActorForwardRole): ...


class SlowActor(ActorRole):
    def _open_trainer(self) -> Backend[PolicyObjective]:
        trainer = super()._open_trainer()
        accumulate = trainer.accumulate

        def slowly(step: int, *args: Any, **kwargs: Any) -> None:
            if slow_at(step) == "actor":
                time.sleep(SLOW_S)
            accumulate(step, *args, **kwargs)

        trainer.accumulate = slowly  # type: ignore[method-assign]
        return trainer


def config_of(folder: Path) -> RunConfig:
    return RunConfig(
        name=NAME,
        run_dir=folder,
        num_steps=PER * (1 + len(ORDER)),
        roles={"rollout": SlowRollout, "reference": SlowReference, "actor_fwd": SlowActorForward, "actor": SlowActor},
        max_staleness=1,
        groups=fully_async(reference_replicas=1, actor_fwd_replicas=1),
        model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
        data=DataConfig(rows="tests.e2e.updates:words"),
        reward=RewardConfig(function="tests.e2e.updates:parity"),
        algorithm=AlgorithmConfig(kl_coef=0.01, advantage=by_token, policy_loss=plain),
        rollout=RolloutConfig(
            prompts_per_step=2, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=4, num_slots=8
        ),
        train=TrainConfig(lr=1e-4, micro_batch_tokens=64),
    )


if __name__ == "__main__":
    config = config_of(Path(sys.argv[1]))
    sys.exit(train.main(config, TrainOptions(Path(__file__), plain=True)))
