"""Several updates a step, with mini-batches, passes, whitening, masked corrections, dynamic sampling and spare groups at once."""

from __future__ import annotations

from rondo.launch.config import RunConfig
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig

MODES = {
    "fully_async": fully_async(actor_processes=2),
    "hybrid": hybrid(processes=2),
    "colocate": colocate(processes=2),
}


def words() -> list[dict[str, str]]:
    return [{"prompt": f"{n}>", "label": str(n)} for n in range(40)]


def parity(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return float((len(response) + sum(map(ord, response))) % 2)


config = RunConfig(
    name="updates",
    num_steps=4,
    max_staleness=1,
    groups=MODES["fully_async"],
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=words),
    reward=RewardConfig(function=parity),
    algorithm=AlgorithmConfig(
        name="dapo", normalize_batch="tokens", tis_low=0.5, tis_high=2.0, tis_mode="mask", tis_level="geometric"
    ),
    rollout=RolloutConfig(
        prompts_per_step=6, samples_per_prompt=4, max_prompt_tokens=8, max_new_tokens=6, num_slots=32,
        filter="zero_std", spare_groups=1,
    ),
    train=TrainConfig(lr=1e-3, micro_batch_tokens=96, optimizer_steps_per_batch=2, epochs=2),
)  # fmt: skip
