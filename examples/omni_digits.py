"""Two CPU cores, no downloads, about six minutes: a tiny Qwen3-Omni learns to add digits that it sees and hears.

    rondo train examples/omni_digits.py                       # a picture and a sound in each question
    MODALITY=image rondo train examples/omni_digits.py        # or audio
    DIGITS=PATH/TO/data rondo train examples/omni_digits.py   # real handwriting and speech, see digits.py

A warm-up on worked answers, half of which hold one wrong number, teaches the model what to do, but badly; reinforcement
learning (GRPO, on-policy) then raises the reward of *sampled* answers on held-out pictures and sounds. The engine and the trainer
run on the same processed media, and the gap between their log-probs is measured in every step.
"""

from __future__ import annotations

import os
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

NUM_ROWS = 4000
NUM_HELD_OUT = 256


def image_rows() -> list[dict[str, Any]]:
    return digits.rows("image", held_out=False, num_rows=NUM_ROWS)


def audio_rows() -> list[dict[str, Any]]:
    return digits.rows("audio", held_out=False, num_rows=NUM_ROWS)


def mixed_rows() -> list[dict[str, Any]]:
    return digits.rows("mixed", held_out=False, num_rows=NUM_ROWS)


def held_out_image_rows() -> list[dict[str, Any]]:
    return digits.rows("image", held_out=True, num_rows=NUM_HELD_OUT)


def held_out_audio_rows() -> list[dict[str, Any]]:
    return digits.rows("audio", held_out=True, num_rows=NUM_HELD_OUT)


def held_out_mixed_rows() -> list[dict[str, Any]]:
    return digits.rows("mixed", held_out=True, num_rows=NUM_HELD_OUT)


ROWS = {
    "image": (image_rows, held_out_image_rows),
    "audio": (audio_rows, held_out_audio_rows),
    "mixed": (mixed_rows, held_out_mixed_rows),
}


def make(modality: str) -> RunConfig:
    """The run for "image", "audio" or "mixed"."""
    train, held_out = ROWS[modality]
    return RunConfig(
        name=f"{modality}_digits",
        num_steps=200,
        max_staleness=0,
        role_groups=fully_async(),
        model=ModelConfig(
            build="rondo.models.tiny.qwen3_omni:build", build_args={"mel_bins": 64, "max_positions": 512}
        ),
        data=DataConfig(rows=train, apply_chat_template=True),
        media=MediaConfig(max_group_bytes=1 << 18),
        evaluation=EvalConfig(
            num_prompts=NUM_HELD_OUT, data=DataConfig(rows=held_out, apply_chat_template=True, shuffle=False)
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


config = make(os.environ.get("MODALITY", "mixed"))
