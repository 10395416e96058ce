"""Reasoning-gym: two CPU cores, no downloads, about two minutes. A tiny Qwen3 learns three of its tasks, mixed by weight.

    pip install 'rondo-rl[reasoning-gym]'
    rondo train examples/reasoning_gym_mixture.py

Sums of two digits, products of two digits, and words of three or four letters spelled backward: rows are made as they are asked
for, and the package's own `score_answer` judges what the policy says. A warm-up on answers of which half have a wrong character
shows what answers look like; reinforcement learning then has fewer of them wrong. What each task asks is one token of this
model, which knows letters else.
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
    SourceConfig,
    TrainConfig,
)

ASKED = (
    "State the final answer to the following arithmetic problem: ",
    "Solve the following multiplication: ",
    "Give only the result as your final answer.",
    "Spell this word backward (example: sun -> nus): ",
)
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def half_wrong(prompt: str, label: str, draw: random.Random) -> str:
    """The answer, in half of the cases with another one of its characters, or the next digit, in one place."""
    if draw.random() < 0.5:
        return label
    at = draw.randrange(len(label))
    other = str((int(label[at]) + 1) % 10) if label[at].isdigit() else draw.choice(label)
    return label[:at] + other + label[at + 1 :]


config = RunConfig(
    name="reasoning_gym_mixture",
    num_steps=150,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2, "words": ASKED},
    ),
    data=DataConfig(
        metadata="metadata",
        held_out=512,
        sources={
            "sums": SourceConfig(path="gym:chain_sum", args=DIGITS, weight=2),
            "products": SourceConfig(path="gym:products", args=DIGITS, weight=1),
            "backward": SourceConfig(path="gym:spell_backward", args={"min_word_len": 3, "max_word_len": 4}, weight=1),
        },
    ),
    evaluation=EvalConfig(num_prompts=512),
    reward=RewardConfig(function="reasoning_gym", args={"inside": None}),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=32,
        samples_per_prompt=8,
        max_prompt_tokens=24,
        max_new_tokens=8,
        num_slots=256,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=4096),
    sft=SftConfig(demonstrate=half_wrong, steps=500, batch_size=128, lr=2e-3, warmup_steps=20),
)
