"""One machine with 8 GPUs of 80 GB: Qwen3-8B on word problems with GRPO, four devices to generate with SGLang and four to train.

    rondo check examples/full_size/qwen3_8b_text.py --devices 8 --device-gib 80 --memory-gib 1000 --set model.path=FOLDER

`data.path` names JSON Lines with a `question` and an `answer` whose last number is the result, as GSM8K's are; nothing is
downloaded but the model, unless `model.path` is a folder. `make sglang` builds the environment of the servers. To check, a folder
with config.json and tokenizer is enough.
"""

from __future__ import annotations

import re

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
    full_size,
)

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def same_number(response: str, label: str, *, prompt: object, metadata: dict[str, object]) -> float:
    """1 when the last number of the response is that of the worked answer."""
    found, wanted = (NUMBER.findall(text.replace("$", "")) for text in (response, label))
    return float(bool(found) and bool(wanted) and _value(found[-1]) == _value(wanted[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


config = RunConfig(
    name="qwen3_8b_text",
    num_steps=200,
    max_staleness=1,
    role_groups=fully_async(rollout_replicas=4, rollout_devices=1, actor_processes=4, actor_devices=1),
    model=ModelConfig(path="Qwen/Qwen3-8B"),
    data=DataConfig(
        path="gsm8k/train.jsonl",
        prompt="question",
        label="answer",
        apply_chat_template=True,
        chat_template_args={"enable_thinking": False},
        held_out=256,
    ),
    evaluation=EvalConfig(num_prompts=256),
    reward=RewardConfig(function=same_number, num_workers=4),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=64,
        samples_per_prompt=8,
        max_prompt_tokens=512,
        max_new_tokens=1536,
        num_slots=128,
        sglang=SGLangConfig(python=".venv-sglang/bin/python", weights="tensor"),
    ),
    train=full_size(8.2e9, ranks=4, lr=1e-6, warmup_steps=10, save_every=50),
)
