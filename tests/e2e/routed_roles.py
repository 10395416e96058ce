"""The roles of the run of `routed.py`, whose routers choose other experts, and which watch what is replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from rondo.comm.bus.bus import Round
from rondo.models.packing import PackedBatch
from rondo.models.routing import listen, routers_of
from rondo.roles.actor import ActorRole, Read
from rondo.roles.forward import ActorForwardRole
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective, TrainRow
from tests.e2e.routed import NUM_EXPERTS


def divert(model: Any) -> None:
    """Its routers choose the experts beside those that they would choose."""

    def beside(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = output
        return logits, weights, (experts + 1) % NUM_EXPERTS

    for router in routers_of(model).values():
        router.register_forward_hook(beside, prepend=True)


class Watch:
    """What a trainer computes, micro-batch by micro-batch."""

    def __init__(self, trainer: Backend[PolicyObjective], file: Path) -> None:
        self._packed: PackedBatch | None = None
        self._file, self._num_checked, self._told = file, 0, dict[str, Any]()
        self._pack, trainer.objective._packed = trainer.objective._packed, self._seen  # type: ignore[method-assign]
        listen(trainer.model, self._check)

    def _seen(self, rows: Any) -> PackedBatch:
        if self._told:
            with self._file.open("ab") as file:
                file.write(orjson.dumps(self._told | {"checked": self._num_checked}) + b"\n")
        packed, self._num_checked = self._pack(rows), 0
        self._packed, self._told = packed, self._of(rows, packed)
        return packed

    def _of(self, rows: list[TrainRow], packed: PackedBatch) -> dict[str, Any]:
        return {
            "rows": len(rows),
            "media": sum(row.media is not None for row in rows),
            "prompts": len({own[0] for own in packed.pieces}),
            "interrupted": sum(len(set(row.policy_versions.tolist())) > 1 for row in rows),
            "recorded": 0 if packed.routes is None else int(packed.routes.recorded.sum()),
        }

    def _check(self, layer: int, experts: torch.Tensor) -> None:
        assert self._packed is not None
        if (routes := self._packed.routes) is not None:
            where = routes.recorded
            assert torch.equal(experts[where], routes.experts[where, layer].to(experts.dtype))
            self._num_checked += int(where.sum())


class DivertedActor(ActorRole):
    def _open_trainer(self) -> Backend[PolicyObjective]:
        trainer = super()._open_trainer()
        divert(trainer.model)
        Watch(trainer, self._ctx.run_dir / f"seen.{self._ctx.rank}.jsonl")
        return trainer

    def _read(self, made: Round) -> Read:
        rows, ages = super()._read(made)
        for row in rows:
            assert row.routed_experts is not None
            assert row.routed_experts.shape == (len(row.tokens) - 1, 2, 2) and row.routed_experts.dtype == np.uint8
            assert not row.routed_experts.flags.owndata  # it lies in the ring
        return rows, ages


class ForgetfulActor(DivertedActor):
    def _read(self, made: Round) -> Read:
        rows, ages = super()._read(made)
        return [replace(row, routed_experts=None) for row in rows], ages


class DivertedForward(ActorForwardRole):
    def _open_scorer(self, path: str, job: Any) -> Any:
        scorer = super()._open_scorer(path, job)
        divert(scorer._model)
        return scorer
