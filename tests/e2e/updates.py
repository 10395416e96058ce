"""Several updates a step, with mini-batches, passes, whitening, masked corrections, dynamic sampling and spare groups at once.

Where scoring shares the trainer's processes there are two teachers, one for each half of the rows.
"""

from __future__ import annotations

from typing import Any

from rondo.launch.config import RunConfig
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    DistillationConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
    TrainConfig,
)
from rondo.runtime.config import SupervisionConfig


def teacher(seed: int) -> TeacherConfig:
    arguments = {"hidden_size": 64, "num_layers": 1, "seed": seed}
    return TeacherConfig(model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args=arguments))


TAUGHT = DistillationConfig(
    teachers={"odd": teacher(1), "even": teacher(2)},
    source="kind",
    form="loss",
    support="teacher",
    top_k=3,
    divergence="jsd",
)
MODES: dict[str, dict[str, Any]] = {
    "fully_async": {"role_groups": fully_async(actor_processes=2)},
    "hybrid": {"role_groups": hybrid(processes=2, teacher=True), "distillation": TAUGHT},
    "colocate": {"role_groups": colocate(processes=2, teacher=True), "distillation": TAUGHT},
}


def words() -> list[dict[str, Any]]:
    return [{"prompt": f"{n}>", "label": str(n), "extra": {"kind": ("even", "odd")[n % 2]}} for n in range(40)]


def parity(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return float((len(response) + sum(map(ord, response))) % 2)


config = RunConfig(
    name="updates",
    num_steps=4,
    max_staleness=1,
    supervision=SupervisionConfig(silence_s=120, grace_s=120),
    **MODES["fully_async"],
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=words, metadata="extra"),
    reward=RewardConfig(function=parity, deadline_s=120),
    algorithm=AlgorithmConfig(
        name="dapo", normalize_batch="tokens", tis_low=0.5, tis_high=2.0, tis_mode="mask", tis_level="geometric"
    ),
    rollout=RolloutConfig(
        prompts_per_step=6, samples_per_prompt=4, max_prompt_tokens=8, max_new_tokens=6, num_slots=32,
        filter="zero_std", spare_groups=1,
    ),
    train=TrainConfig(lr=1e-3, micro_batch_tokens=96, num_mini_batches=2, passes=2),
)  # fmt: skip
