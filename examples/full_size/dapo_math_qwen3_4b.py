"""One machine with 8 GPUs of 80 GB: Qwen3-4B on DAPO-Math-17k, four devices to generate with SGLang and four to train.

    rondo check examples/full_size/dapo_math_qwen3_4b.py --devices 8 --device-gib 80 --memory-gib 1000 --set model.path=FOLDER

The rows of `zhuzilin/dapo-math-17k` are chats that ask for a last line `Answer: ...` themselves, so nothing is put in front of
them; `dapo` is the reward of DAPO, 1 or -1. AIME 2024 is evaluated at the start and the end.
"""

from __future__ import annotations

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SGLangConfig,
    benchmark,
    full_size,
)

config = RunConfig(
    name="dapo_math_qwen3_4b",
    num_steps=200,
    max_staleness=1,
    role_groups=fully_async(rollout_replicas=4, rollout_devices=1, actor_processes=4, actor_devices=1),
    model=ModelConfig(path="Qwen/Qwen3-4B"),
    data=DataConfig(path="hub:zhuzilin/dapo-math-17k/train", apply_chat_template=True),
    evaluation=EvalConfig(sets={"aime24": benchmark("aime24", samples_per_prompt=8)}),
    reward=RewardConfig(function="dapo", num_workers=4),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=32,
        samples_per_prompt=8,
        max_prompt_tokens=2048,
        max_new_tokens=8192,
        num_slots=128,
        sglang=SGLangConfig(python=".venv-sglang/bin/python", weights="tensor"),
    ),
    train=full_size(4.0e9, ranks=4, lr=1e-6, warmup_steps=10, save_every=50),
)
