"""GSM8K's whole problems for a small pretrained model: short ones, two rewards of the hub, apart and added up."""

from __future__ import annotations

from collections.abc import Iterable

from rondo.launch.config import RunConfig
from rondo.launch.modes import hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, EvalConfig, RewardConfig, RolloutConfig, TrainConfig

MAX_CHARACTERS = 170
"""Of a question: about a third of the problems."""


def short(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Those whose question is short, as they lie."""
    return [row for row in rows if len(row["question"]) <= MAX_CHARACTERS]


config = RunConfig(
    name="gsm8k",
    num_steps=12,
    max_staleness=1,
    role_groups=hybrid(threads=2),
    model=ModelConfig(path="smollm2.gguf"),
    data=DataConfig(
        path="gsm8k/train.jsonl",
        transform=short,
        prompt="question",
        label="answer",
        apply_chat_template=True,
        held_out=64,
        system="Solve the problem in one or two short lines. End with a line that is #### and the number.",
    ),
    evaluation=EvalConfig(num_prompts=64),
    reward=RewardConfig(
        function={"right": "gsm8k", "form": "format"},
        components={"right": 1.0, "form": 0.2},
        args={"anywhere": True, "pattern": r".*\n#### *\$?-?[0-9][0-9.,]*\s*"},
    ),
    algorithm=AlgorithmConfig(name="grpo"),
    rollout=RolloutConfig(
        prompts_per_step=4, samples_per_prompt=8, max_prompt_tokens=112, max_new_tokens=80, num_slots=64
    ),
    train=TrainConfig(lr=2e-5, micro_batch_tokens=1280, betas=(0.9, 0.95)),
)
