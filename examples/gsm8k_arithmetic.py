"""Real input: two CPU cores, a few minutes. A tiny Qwen3 learns the arithmetic steps that GSM8K's solutions mark.

    rondo train examples/gsm8k_arithmetic.py --set data.path=train.jsonl

GSM8K's worked answers mark each calculation: "48/2 = <<48/2=24>>24". The rows are those with one operation on integers below
1,000 and an integer result, as often as they come (16,723 in the train file, 5,226 distinct): so most of the 1,000 held-out
rows ask for something that is among the training rows too, and the reward measures recall as well as arithmetic. `data.path`
names the JSON Lines file; nothing is downloaded. Half of the demonstrations of the warm-up are corrupted, so that
reinforcement learning has something to mend.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

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

STEP = re.compile(r"<<(\d{1,3})([-+*/])(\d{1,3})=(\d{1,6})>>")
WIDTH = 7


def arithmetic(row: dict[str, str]) -> list[dict[str, str]]:
    """The marked steps of one GSM8K row: {"prompt": "   48/2=", "label": "24"}."""
    return [
        {"prompt": f"{a}{op}{b}".rjust(WIDTH) + "=", "label": str(int(result))}
        for a, op, b, result in STEP.findall(row["answer"])
    ]


def steps(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Every marked step of all rows, in the order of the file, as often as it comes."""
    return [step for row in rows for step in arithmetic(row)]


def half_wrong(prompt: str, label: str, draw: random.Random) -> str:
    """A demonstration: the result, in half of the cases with one digit changed."""
    answer = list(label)
    if draw.random() < 0.5:
        place = draw.randrange(len(answer))
        answer[place] = str((int(answer[place]) + draw.randint(1, 9)) % 10)
    return "".join(answer)


config = RunConfig(
    name="gsm8k_arithmetic",
    num_steps=200,
    max_staleness=1,
    role_groups=fully_async(reference_replicas=1, actor_fwd_replicas=1),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 128, "num_layers": 3}),
    data=DataConfig(path="gsm8k/train.jsonl", transform=steps, held_out=1000),
    evaluation=EvalConfig(num_prompts=1000),
    reward=RewardConfig(function="exact"),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, kl_coef=0.01, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=32, samples_per_prompt=8, max_prompt_tokens=8, max_new_tokens=8, num_slots=256
    ),
    train=TrainConfig(lr=2e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(demonstrate=half_wrong, steps=600, batch_size=128, lr=2e-3, warmup_steps=20),
)
