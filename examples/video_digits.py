"""Two CPU cores, no downloads, about four minutes: a tiny Qwen3-Omni learns to add digits that a video shows one after another.

    rondo train examples/video_digits.py
    rondo train examples/video_digits.py --set num_steps=2000       # does it stay learned? about ten minutes
    DIGITS=PATH/TO/data rondo train examples/video_digits.py        # real handwriting, see digits.py

Each video has four frames: a digit, the same digit moved, and so for the second one. The warm-up and the rest are as in
omni_digits.py, with fewer samples a step.
"""

from __future__ import annotations

from typing import Any

import digits

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)


def rows() -> list[dict[str, Any]]:
    return digits.rows("video", held_out=False, num_rows=4000)


def held_out_rows() -> list[dict[str, Any]]:
    return digits.rows("video", held_out=True, num_rows=256)


config = RunConfig(
    name="video_digits",
    num_steps=200,
    max_staleness=0,
    role_groups=fully_async(),
    model=ModelConfig(build="rondo.models.tiny.qwen3_omni:build", build_args={"mel_bins": 64, "max_positions": 512}),
    data=DataConfig(rows=rows, apply_chat_template=True),
    media=MediaConfig(video_min_tokens=4, video_max_tokens=4, max_group_bytes=1 << 18),
    evaluation=EvalConfig(
        num_prompts=256, data=DataConfig(rows=held_out_rows, apply_chat_template=True, shuffle=False)
    ),
    reward=RewardConfig(function=digits.exact),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=96,
        max_new_tokens=8,
        num_slots=128,
    ),
    train=TrainConfig(lr=3e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(
        demonstrate=digits.demonstrate, steps=700, batch_size=48, lr=3e-3, warmup_steps=20, micro_batch_tokens=16384
    ),
)
