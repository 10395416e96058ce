"""A small run: one process a role, no warm-up, no KL. Responses are long, so that there is something in flight to lose; no update
comes upon them, so that engine and trainer compute on the same weights and caches."""

from __future__ import annotations

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, RewardConfig, RolloutConfig, TrainConfig


def words() -> list[dict[str, str]]:
    return [{"prompt": f"{n}>", "label": str(n)} for n in range(64)]


def even(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return float(len(response) % 2 == 0)


config = RunConfig(
    name="small",
    num_steps=8,
    max_staleness=0,
    role_groups=fully_async(),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 64, "num_layers": 2}),
    data=DataConfig(rows=words, shuffle=False),
    reward=RewardConfig(function=even),
    rollout=RolloutConfig(
        prompts_per_step=4, samples_per_prompt=4, max_prompt_tokens=8, max_new_tokens=64, num_slots=32
    ),
    train=TrainConfig(lr=1e-4, micro_batch_tokens=512),
)
