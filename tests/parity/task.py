"""A tiny Qwen3 on ten rows, seven times over: what the parity tests train. Rewards depend on every token that is sampled."""

from __future__ import annotations

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig


def rows() -> list[dict[str, str]]:
    return [{"prompt": "abcdefghij"[n] * (1 + n % 3) + ">", "label": str(n)} for n in range(10)]


def spread(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return sum(response.encode()) % 7 / 7


config = RunConfig(
    name="parity",
    num_steps=25,
    max_staleness=0,
    deterministic=True,
    role_groups=fully_async(reference_replicas=1),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=rows, num_passes=7),
    reward=RewardConfig(function=spread),
    algorithm=AlgorithmConfig(kl_coef=0.05),
    rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=3, max_prompt_tokens=8, max_new_tokens=6, num_slots=8),
    train=TrainConfig(lr=1e-3, micro_batch_tokens=48, save_every=3),
)
