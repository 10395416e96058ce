"""What is slow in turn in the run of `slowed.py`, and the advantages and the loss that are that run's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from rondo.roles.actor import ActorRole
from rondo.roles.algorithms.losses import Batch
from rondo.roles.config import AlgorithmConfig
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.forward import ActorForwardRole, ReferenceRole
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease, PromptGroups
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective
from tests.e2e.slowed import SLOW_S, slow_at

_step: ContextVar[int] = ContextVar("step")


def _waits(run_dir: Path, step: int) -> Path:
    """There from when on the trainer has waited for a round of that step."""
    return run_dir / f"waits.{step}"


def _sleep(waits: Path) -> None:
    """Behind the moment from which the trainer waits."""
    while not waits.exists():
        time.sleep(0.005)
    time.sleep(SLOW_S)


def by_token(rewards: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.full(len(mask), reward) for reward, mask in zip(rewards - 0.5, masks, strict=True)])


def plain(batch: Batch, algorithm: AlgorithmConfig) -> Any:
    return -batch.log_probs * batch.advantages, {"own_entropy": batch.entropy}


class SlowGroups(PromptGroups):
    async def fill(self, lease: Lease) -> None:
        _step.set(lease.step)
        await super().fill(lease)

    async def _slowly(self, what: str) -> None:
        if slow_at(_step.get()) == what:
            await asyncio.to_thread(_sleep, _waits(self.ctx.run_dir, _step.get()))

    async def _generate(self, request: Request) -> Completion:
        await self._slowly("rollout")
        return await super()._generate(request)

    async def _score(self, row: Any, finished: Any) -> Any:
        await self._slowly("reward")
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
                _sleep(_waits(self._ctx.run_dir, of["step"]))
            return score(rows, **asked)

        self._ctx.span, scorer.score = noting, slowly
        return scorer


class SlowReference(_SlowForward, ReferenceRole): ...


class SlowActorForward(_SlowForward, ActorForwardRole): ...


class SlowActor(ActorRole):
    def _open_trainer(self) -> Backend[PolicyObjective]:
        trainer = super()._open_trainer()
        accumulate, span, of = trainer.accumulate, self._ctx.span, dict[str, int]()

        @contextmanager
        def noting(name: str, **told: Any) -> Iterator[Any]:
            if name == "step":
                of["step"] = told["step"]
            with span(name, **told) as opened:
                if name == "wait for a round":
                    _waits(self._ctx.run_dir, of["step"]).touch()
                yield opened

        def slowly(step: int, *args: Any, **kwargs: Any) -> None:
            if slow_at(step) == "actor":
                time.sleep(SLOW_S)
            accumulate(step, *args, **kwargs)

        self._ctx.span, trainer.accumulate = noting, slowly  # type: ignore[method-assign, assignment]
        return trainer
