"""On-policy, without KL, so without actor_fwd and reference; two actor processes; one reward raises, one never returns."""

from __future__ import annotations

import time

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, RewardConfig, RolloutConfig, TrainConfig


def words() -> list[dict[str, str]]:
    return [{"prompt": f"{n}>", "label": str(n)} for n in range(40)]


def moody(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    if label == "7":
        raise ZeroDivisionError("seven")
    if label == "13":
        time.sleep(3600)
    return float(len(response) % 2)


config = RunConfig(
    name="on_policy",
    num_steps=5,
    max_staleness=0,
    groups=fully_async(actor_processes=2),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=words, shuffle=False),
    reward=RewardConfig(function=moody, deadline_s=1.0, max_failures=1),
    rollout=RolloutConfig(
        prompts_per_step=6, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=6, num_slots=16
    ),
    train=TrainConfig(lr=1e-4, micro_batch_tokens=64),
)
