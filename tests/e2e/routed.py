"""A run with router replay whose trainer and actor_fwd would by themselves send every token to other experts than the engine.

The recorded experts alone make their log-probs those of the engine, which the settings demand; with `forget` they are thrown away
in front of the trainer. `python -m tests.e2e.routed FOLDER MODE [forget] [SETTING=VALUE ...]`
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import Round
from rondo.launch import train
from rondo.launch.config import RunConfig, override
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.launch.plan import group_specs
from rondo.launch.train import TrainOptions
from rondo.models.config import ModelConfig
from rondo.models.routing import routers_of
from rondo.roles.actor import ActorRole, Read
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.forward import ActorForwardRole
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective
from rondo.runtime.supervision.spec import GroupSpec

NAME, NUM_STEPS, NUM_EXPERTS = "routed", 5, 4
MODES = {
    "fully_async": fully_async(actor_processes=2, actor_fwd_replicas=1),
    "hybrid": hybrid(actor_fwd=True),
    "colocate": colocate(processes=2),
}


def divert(model: Any) -> None:
    """Its routers choose the experts beside those that they would choose."""

    def beside(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = output
        return logits, weights, (experts + 1) % NUM_EXPERTS

    for router in routers_of(model).values():
        router.register_forward_hook(beside, prepend=True)


class DivertedActor(ActorRole):
    def _open_trainer(self) -> Backend[PolicyObjective]:
        trainer = super()._open_trainer()
        divert(trainer.model)
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


def config_of(folder: Path, mode: str) -> RunConfig:
    staleness = 0 if mode == "colocate" else 2
    interrupted: dict[str, Any] = {"on_new_weights": "interrupt", "max_interruptions": 1} if staleness else {}
    return RunConfig(
        name=NAME,
        run_dir=folder,
        num_steps=NUM_STEPS,
        max_staleness=staleness,
        groups=MODES[mode],
        model=ModelConfig(
            build="rondo.models.tiny.qwen3:build",
            build_args={
                "hidden_size": 64, "num_experts": NUM_EXPERTS, "moe_intermediate_size": 32, "tie_embeddings": False,
            },  # as SGLang serves mixtures
        ),
        data=DataConfig(rows="tests.e2e.updates:words"),
        reward=RewardConfig(function="tests.e2e.updates:parity"),
        algorithm=AlgorithmConfig(old_log_probs="actor_fwd" if staleness else "auto"),
        rollout=RolloutConfig(
            prompts_per_step=4, samples_per_prompt=4, max_prompt_tokens=8, max_new_tokens=48, num_slots=8, **interrupted
        ),
        train=TrainConfig(
            lr=1e-3, micro_batch_tokens=160, router_replay=True, max_log_prob_gap=1e-5,
            activation_checkpointing=mode != "hybrid",
        ),
    )  # fmt: skip


def diverted(spec: GroupSpec, *, forget: bool) -> GroupSpec:
    other = {"actor": ForgetfulActor if forget else DivertedActor, "actor_fwd": DivertedForward}
    roles = [
        f"tests.e2e.routed:{other[role].__name__}" if role in other else path
        for role, path in zip(spec.role_names, spec.roles, strict=True)
    ]
    return replace(spec, roles=tuple(roles))


if __name__ == "__main__":
    folder, mode, *rest = sys.argv[1:]
    config = override(config_of(Path(folder), mode), [text for text in rest if text != "forget"])
    specs = tuple(diverted(spec, forget="forget" in rest) for spec in group_specs(config))
    sys.exit(train.main(config, TrainOptions(Path(__file__), plain=True), groups=specs))
