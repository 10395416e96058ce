"""Agents of your own: two CPU cores, no downloads, a few minutes. A program that calls a model learns by being run.

    rondo train examples/external_agent.py

`external_agent_process.py` is thirty lines of plain Python, with urllib alone: it adds three digits in two calls of a model. It
is started once a sample, the policy answers its calls, and what it was answered is trained, token by token, by the reward that it
posts: for answers that are right, and sure. A warm-up on such conversations, in which every second answer is unsure ("8?"), has
shown the policy what answers look like.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AgentConfig,
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)

ROLES = ("user", "assistant", "user", "assistant")
AGENT = Path(__file__).with_name("external_agent_process.py")


def sums(num_rows: int = 4000, seed: int = 0) -> list[dict[str, str]]:
    """Rows such as {"numbers": "1 3 2"}."""
    draw = random.Random(seed)
    return [{"numbers": " ".join(str(draw.randint(1, 3)) for _ in range(3))} for _ in range(num_rows)]


def demonstrations(num_rows: int = 15360, seed: int = 1) -> list[dict[str, list[dict[str, str]]]]:
    """Conversations of the agent, in which every second answer is unsure: "8?" in the place of "8"."""
    draw = random.Random(seed)
    rows = []
    for row in sums(num_rows, seed + 1):
        a, b, c = map(int, row["numbers"].split())
        first, second = (f"{number}{draw.choice(['', '?'])}" for number in (a + b, a + b + c))
        talk = f"{a}+{b}", first, f"{a + b}+{c}", second
        rows.append({"messages": [{"role": role, "content": text} for role, text in zip(ROLES, talk, strict=True)]})
    return rows


config = RunConfig(
    name="external_agent",
    num_steps=16,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(rows=sums, prompt="numbers", label=None, held_out=16),
    evaluation=EvalConfig(num_prompts=16),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=8,
        samples_per_prompt=8,
        max_prompt_tokens=32,
        max_new_tokens=48,
        max_turns=2,
        agent=AgentConfig(command=(sys.executable, "-S", str(AGENT)), deadline_s=120, max_processes=8),
        num_slots=64,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=4096),
    sft=SftConfig(
        data=DataConfig(rows=demonstrations, prompt="messages", label=None, apply_chat_template=True),
        turns="all",
        steps=100,
        batch_size=16,
        lr=2e-3,
        warmup_steps=10,
    ),
)
