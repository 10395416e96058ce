"""A real pretrained model: two CPU cores, 98 MB of download, under twenty minutes. It learns sums of two numbers.

    make demo MODEL=smollm2                                                    # fetches SmolLM2-135M-Instruct and does all
    rondo train examples/pretrained_sums.py --set model.path=FOLDER   # or a GGUF file

Any causal model with a chat template will do: the question goes through the template, and the reward looks at the last number
of the answer. There is no warm-up. What the model answered before and after is in the run's `samples/`.
"""

from __future__ import annotations

import random
import re

from rondo.launch.config import RunConfig
from rondo.launch.modes import hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, EvalConfig, RewardConfig, RolloutConfig, TrainConfig


def sums(num_rows: int = 2000, seed: int = 0) -> list[dict[str, str]]:
    """Rows such as {"prompt": "What is 27 + 61? Answer with the number only.", "label": "88"}, no two alike."""
    pairs = random.Random(seed).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], num_rows)
    return [{"prompt": f"What is {a} + {b}? Answer with the number only.", "label": str(a + b)} for a, b in pairs]


def right(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """1 where the last number of the answer is the sum, 0.1 for any number at all."""
    numbers = re.findall(r"\d+", response)
    return 1.0 if numbers and numbers[-1] == label else 0.1 * bool(numbers)


config = RunConfig(
    name="pretrained_sums",
    num_steps=36,
    max_staleness=1,
    role_groups=hybrid(threads=2),
    model=ModelConfig(path="smollm2.gguf"),
    data=DataConfig(rows=sums, apply_chat_template=True, held_out=200),
    evaluation=EvalConfig(num_prompts=200),
    reward=RewardConfig(function=right),
    algorithm=AlgorithmConfig(name="grpo"),
    rollout=RolloutConfig(
        prompts_per_step=8, samples_per_prompt=8, max_prompt_tokens=64, max_new_tokens=24, num_slots=64
    ),
    train=TrainConfig(lr=2e-5, micro_batch_tokens=1280, betas=(0.9, 0.95)),
)
