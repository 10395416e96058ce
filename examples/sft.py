"""Supervised fine-tuning as a job of its own: two CPU cores, no downloads, a minute. A tiny Qwen3 learns to answer in a chat.

    rondo train examples/sft.py

Each chat asks to sort digits, and then for the least of them; both answers are learnt (`turns="all"`). What is held out is
measured beside the training: its loss, the share of its tokens that the model finds likeliest, and, in a process of its own, how
many of the answers that it samples are right. The result is a folder that a run with rollouts begins with:
`--set model.path=runs/sft/checkpoints/step_000200/hf`.
"""

from __future__ import annotations

import random
from typing import Any

from rondo.launch.config import RunConfig
from rondo.launch.modes import trainer
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, EvalConfig, RewardConfig, SftConfig, TrainConfig


def chats(num_rows: int = 6000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows such as {"messages": [{"role": "user", "content": "s3142"}, {"role": "assistant", "content": "1234"}, ...]}."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        digits = [str(draw.randint(0, 9)) for _ in range(4)]
        said = [f"s{''.join(digits)}", "".join(sorted(digits)), "min", min(digits)]
        roles = ("user", "assistant") * 2
        rows.append({"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]})
    return rows


def exact(response: str, label: str, *, prompt: Any, metadata: dict[str, object]) -> float:
    """1 for the right answer."""
    return float(response == label)


config = RunConfig(
    name="sft",
    job="sft",
    role_groups=trainer(rollout=True),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 128, "num_layers": 2}),
    sft=SftConfig(
        data=DataConfig(rows=chats, prompt="messages", label=None, apply_chat_template=True, held_out=256),
        turns="all",
        steps=200,
        batch_size=64,
        lr=2e-3,
        warmup_steps=20,
        evaluate_every=50,
    ),
    evaluation=EvalConfig(num_prompts=128, every=50, max_new_tokens=6),
    reward=RewardConfig(function=exact),
    train=TrainConfig(save_every=100),
)
