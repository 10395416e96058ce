"""Quick start: two CPU cores, no downloads, about two minutes. A tiny Qwen3 learns to sort four digits.

    rondo train examples/quickstart.py

A warm-up on demonstrations of which nine in ten hold one wrong digit teaches the model what to do, but badly; reinforcement
learning (GRPO, one version stale, a small KL to the warmed-up policy) then raises the reward of *sampled* answers. Five role
groups run beside each other: rollout, actor, actor_fwd, reference and advantages.
"""

from __future__ import annotations

import random

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)


def puzzles(num_rows: int = 6000, seed: int = 0) -> list[dict[str, str]]:
    """Rows such as {"prompt": "s3142>", "label": "1234"}."""
    draw = random.Random(seed)
    digits = [[draw.randint(0, 9) for _ in range(4)] for _ in range(num_rows)]
    return [{"prompt": f"s{''.join(map(str, d))}>", "label": "".join(map(str, sorted(d)))} for d in digits]


def demonstrations(num_rows: int = 15360, seed: int = 1) -> list[dict[str, str]]:
    """Worked examples, nine in ten with one digit wrong: enough to learn the task, too little to be sure of it."""
    draw = random.Random(seed)
    rows = []
    for row in puzzles(num_rows, seed + 1):
        answer = list(row["label"])
        if draw.random() < 0.9:
            place = draw.randrange(4)
            answer[place] = str((int(answer[place]) + draw.randint(1, 9)) % 10)
        rows.append({"prompt": row["prompt"], "answer": "".join(answer)})
    return rows


def exact(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """1 for exactly the sorted digits."""
    return float(response == label)


config = RunConfig(
    name="quickstart",
    num_steps=150,
    max_staleness=1,
    role_groups=fully_async(reference_replicas=1, actor_fwd_replicas=1),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(rows=puzzles, held_out=256),
    evaluation=EvalConfig(num_prompts=256),
    reward=RewardConfig(function=exact),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, kl_coef=0.02, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=32,
        samples_per_prompt=8,
        max_prompt_tokens=8,
        max_new_tokens=6,
        num_slots=256,
    ),
    train=TrainConfig(lr=2e-4, warmup_steps=5, micro_batch_tokens=4096),
    sft=SftConfig(rows=demonstrations, steps=120, batch_size=128, lr=2e-3, warmup_steps=20),
)
