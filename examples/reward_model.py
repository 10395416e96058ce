"""A reward model: two CPU cores, no downloads, two minutes. A tiny Qwen3 that sorts digits badly learns to tell a sorted answer
from one with a wrong digit, by one number for each.

    rondo train examples/reward_model.py

The model is that of `examples/dpo.py`, and so are the pairs. `rewards/accuracies` is the share of pairs in which the right answer
has the higher reward; `eval_` is of pairs that are held out. `center_rewards_coef` keeps rewards around 0.
"""

from __future__ import annotations

from dpo import pairs
from quickstart_lora import base

from rondo.launch.config import RunConfig
from rondo.launch.modes import trainer
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, RewardModelConfig, TrainConfig

config = RunConfig(
    name="reward_model",
    job="reward_model",
    role_groups=trainer(),
    model=ModelConfig(build=base, build_args={"steps": 120}),
    reward_model=RewardModelConfig(
        data=DataConfig(rows=pairs, label="chosen", rejected="rejected", held_out=256),
        steps=120,
        batch_size=64,
        lr=1e-3,
        warmup_steps=5,
        center_rewards_coef=0.01,
        evaluate_every=40,
    ),
    train=TrainConfig(save_every=40),
)
