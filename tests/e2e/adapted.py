"""A run that trains adapters, whose engine computes without them, or keeps the first version for ever, or whose server skips what
comes after the first; or all is as it should be, and roles are killed.

    python -m tests.e2e.adapted FOLDER [deaf | stuck | skips | whole | valued] [ROLE@STEP ...] [SETTING=VALUE ...]

"valued" is whole, of PPO, whose critic has adapters, too.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rondo.launch import train
from rondo.launch.config import RunConfig, override
from rondo.launch.modes import fully_async
from rondo.launch.plan import group_specs
from rondo.launch.train import TrainOptions
from rondo.models.config import LoraConfig, ModelConfig
from rondo.models.lora import adapted
from rondo.roles.config import AlgorithmConfig, CriticConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.replica import Replica
from rondo.roles.engines.sglang import adapters
from rondo.roles.rollout import RolloutRole
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.supervision.spec import GroupSpec
from rondo.runtime.worker.context import WorkerContext

NAME, NUM_STEPS = "adapted", 24


class DeafReplica(Replica):
    def _build(self, num_slots: int, **options: Any) -> SlotEngine:
        slots = super()._build(num_slots, **options)
        for product in adapted(slots._forward._model).values():  # type: ignore[attr-defined]
            product.alone = True
        return slots


class StuckReplica(Replica):
    def _build(self, num_slots: int, **options: Any) -> SlotEngine:
        slots = super()._build(num_slots, **options)
        load = slots._forward.load

        def load_the_first(tensors: Any) -> None:
            self.num_loaded = getattr(self, "num_loaded", 0) + 1
            if self.num_loaded <= 2:  # the canary, and version 0
                load(tensors)

        slots._forward.load = load_the_first  # type: ignore[method-assign]
        return slots


class Skips(RolloutRole):
    """Of a server, which takes weights whose names it does not know, and generates without them."""

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__(ctx)
        completed, asked = adapters.completed, itertools.count()

        def renamed(*args: Any) -> dict[str, Any]:
            new = ".layers." if next(asked) < 2 else ".blocks."
            return {name.replace(".layers.", new): tensor for name, tensor in completed(*args).items()}

        adapters.completed = renamed


class Deaf(RolloutRole):
    open_replica = DeafReplica


class Stuck(RolloutRole):
    open_replica = StuckReplica


def config_of(folder: Path) -> RunConfig:
    return RunConfig(
        name=NAME,
        run_dir=folder,
        num_steps=NUM_STEPS,
        max_staleness=1,
        supervision=SupervisionConfig(silence_s=120, grace_s=120),
        role_groups=fully_async(),
        model=ModelConfig(
            build="rondo.models.tiny.qwen3:build",
            build_args={"hidden_size": 64, "num_experts": 4, "moe_intermediate_size": 32},
        ),
        data=DataConfig(rows="tests.e2e.updates:words"),
        reward=RewardConfig(function="tests.e2e.updates:parity", deadline_s=120),
        rollout=RolloutConfig(
            prompts_per_step=4, samples_per_prompt=4, max_prompt_tokens=8, max_new_tokens=16, num_slots=16
        ),
        train=TrainConfig(
            lr=1e-2, micro_batch_tokens=512, lora=LoraConfig(rank=4, targets=("q_proj", "o_proj", "experts"))
        ),
    )


def planted(spec: GroupSpec, role: str) -> GroupSpec:
    roles = [
        f"tests.e2e.adapted:{role}" if name == "rollout" else path
        for name, path in zip(spec.role_names, spec.roles, strict=True)
    ]
    return replace(spec, roles=tuple(roles))


if __name__ == "__main__":
    folder, fault, *rest = sys.argv[1:]
    config = config_of(Path(folder))
    if fault == "valued":
        critic = CriticConfig(lr=1e-2, lora=LoraConfig(rank=4))
        own = {
            "role_groups": fully_async(critic_processes=2),
            "algorithm": AlgorithmConfig(name="ppo"),
            "critic": critic,
        }
        config = RunConfig.model_validate(dict(config) | own)
    config = override(config, [text for text in rest if "=" in text])
    specs = group_specs(config)
    if fault not in ("whole", "valued"):
        specs = tuple(planted(spec, fault.title()) for spec in specs)
    kill = tuple((role, int(step)) for role, step in (text.split("@") for text in rest if "=" not in text))
    sys.exit(train.main(config, TrainOptions(Path(__file__), kill, plain=True), groups=specs))
