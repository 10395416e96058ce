"""Direct preference optimisation: two CPU cores, no downloads, two minutes. A tiny Qwen3 that sorts digits badly is told which of
two answers is better.

    rondo train examples/dpo.py

The model is the warmed-up one of `examples/quickstart_lora.py`, which learnt from demonstrations of which nine in ten have a
wrong digit; a pair is the right answer and one with a wrong digit. `rewards/accuracies` is the share of pairs in which the right
answer has gained more of the policy's log-prob, over the weights that it began with, than the wrong one; `eval_` is of pairs that
are held out, and `mean@4` the share of right answers to their prompts, of four that a process of its own samples.
"""

from __future__ import annotations

import random

from quickstart import exact, puzzles
from quickstart_lora import base

from rondo.launch.config import RunConfig
from rondo.launch.modes import trainer
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, DpoConfig, EvalConfig, RewardConfig, TrainConfig


def pairs(num_rows: int = 4096, seed: int = 2) -> list[dict[str, str]]:
    """Rows such as {"prompt": "s3142>", "chosen": "1234", "rejected": "1834"}."""
    draw = random.Random(seed)
    rows = []
    for row in puzzles(num_rows, seed + 1):
        wrong, place = list(row["label"]), draw.randrange(4)
        wrong[place] = str((int(wrong[place]) + draw.randint(1, 9)) % 10)
        rows.append({"prompt": row["prompt"], "chosen": row["label"], "rejected": "".join(wrong)})
    return rows


config = RunConfig(
    name="dpo",
    job="dpo",
    role_groups=trainer(rollout=True),
    model=ModelConfig(build=base, build_args={"steps": 120}),
    dpo=DpoConfig(
        data=DataConfig(rows=pairs, label="chosen", rejected="rejected", held_out=256),
        steps=60,
        batch_size=64,
        lr=1e-4,
        warmup_steps=5,
        evaluate_every=20,
    ),
    evaluation=EvalConfig(num_prompts=128, samples_per_prompt=4, every=20, max_new_tokens=6),
    reward=RewardConfig(function=exact),
    train=TrainConfig(save_every=20),
)
