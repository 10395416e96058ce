"""Real input: two CPU cores, a few minutes. A tiny Qwen3 learns the arithmetic steps that GSM8K's solutions mark.

    rondo train examples/gsm8k_arithmetic.py --set data.path=train.jsonl

GSM8K's worked answers mark each calculation: "48/2 = <<48/2=24>>24". The rows are those with one operation on integers below
1,000 and an integer result, each once. `data.path` names the JSON Lines file; nothing is downloaded. Half of the
demonstrations of the warm-up are corrupted, so that reinforcement learning has something to mend.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)

STEP = re.compile(r"<<(\d{1,3})([-+*/])(\d{1,3})=(\d{1,6})>>")
WIDTH = 7


def arithmetic(row: dict[str, str]) -> list[dict[str, str]]:
    """The marked steps of one GSM8K row: {"prompt": "   48/2=", "label": "24"}."""
    return [
        {"prompt": f"{a}{op}{b}".rjust(WIDTH) + "=", "label": str(int(result))}
        for a, op, b, result in STEP.findall(row["answer"])
    ]


def exact(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """1 for exactly the result."""
    return float(response == label)
