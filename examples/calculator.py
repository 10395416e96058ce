"""Agents: two CPU cores, no downloads, about a minute and a half. A tiny Qwen3 learns to add with a calculator, in turns.

    rondo train examples/calculator.py

The policy cannot add; a tool can. It is asked "7+5+8=", calls the tool with two numbers ("7+5;"), is told "12;", calls again
("12+8;"), is told "20;", and has to say "20.". A warm-up on demonstrations of which half have a wrong digit in a call or in the
answer shows it how calls are written; reinforcement learning then raises the reward of what it *samples*: only its own words are
trained, as they were sampled, and what the tool said is read.
"""

from __future__ import annotations

import random
import re

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)

CALL = re.compile(r"(\d{1,2})\+(\d{1,2});")


class Calculator:
    """Answers each call of the tool with its sum, until the policy answers itself."""

    replays = True

    async def step(self, said: str) -> str | None:
        call = CALL.fullmatch(said)
        return None if call is None else f"{int(call[1]) + int(call[2])};"


def sums(num_rows: int = 6000, seed: int = 0) -> list[dict[str, str]]:
    """Rows such as {"prompt": "7+5+8=", "label": "20"}."""
    draw = random.Random(seed)
    numbers = [[draw.randint(1, 9) for _ in range(3)] for _ in range(num_rows)]
    return [{"prompt": f"{'+'.join(map(str, each))}=", "label": str(sum(each))} for each in numbers]


def demonstrations(num_rows: int = 15360, seed: int = 1) -> list[dict[str, str]]:
    """What calls look like, with the tool's answers in place; in half of them a digit is wrong."""
    draw = random.Random(seed)
    rows = []
    for row in sums(num_rows, seed + 1):
        a, b, c = map(int, row["prompt"][:-1].split("+"))
        wrong = draw.randrange(3) if draw.random() < 0.5 else 3  # which of three turns has a wrong digit; 3: none

        def said(text: str, turn: int, wrong: int = wrong) -> str:
            places = [at for at, each in enumerate(text) if each.isdigit()]
            at = draw.choice(places)
            return (
                text[:at] + str((int(text[at]) + draw.randint(1, 9)) % 10) + text[at + 1 :] if turn == wrong else text
            )

        first = said(f"{a}+{b};", 0)
        x, y = map(int, first[:-1].split("+"))
        second = said(f"{x + y}+{c};", 1)
        z, w = map(int, second[:-1].split("+"))
        rows.append({"prompt": row["prompt"], "answer": f"{first}{x + y};{second}{z + w};{said(f'{z + w}.', 2)}"})
    return rows


def right(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """1 where the last thing that the policy says is the sum."""
    return float(response.rstrip(".") == label)


config = RunConfig(
    name="calculator",
    num_steps=50,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(rows=sums, held_out=128),
    evaluation=EvalConfig(num_prompts=128),
    reward=RewardConfig(function=right),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=32,
        samples_per_prompt=8,
        max_prompt_tokens=8,
        max_new_tokens=24,
        max_turns=4,
        stop=(";",),
        environment=EnvironmentConfig(factory=Calculator),
        num_slots=256,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=4096),
    sft=SftConfig(rows=demonstrations, steps=120, batch_size=128, lr=2e-3, warmup_steps=20),
)
