"""A run on words whose rewards are a rule and, half as much, the verdict of a random model of its own and the number of another.
For the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rondo.launch.config import RunConfig
from rondo.launch.modes import hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    DataConfig,
    EvalConfig,
    GenrmConfig,
    RewardConfig,
    RolloutConfig,
    ScorerConfig,
    TrainConfig,
)
from rondo.runtime.config import SupervisionConfig

TINY = "rondo.models.tiny.qwen3:build"


def words() -> list[dict[str, str]]:
    return [{"prompt": f"{n}>", "label": str(n)} for n in range(40)]


def rule(response: str, label: str, *, prompt: str, metadata: dict[str, Any]) -> float:
    return float(len(response) % 2)


def verdict(text: str) -> float:
    return sum(map(ord, text)) % 11 / 10


def reward_model(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rondo.models.tiny import qwen3

    qwen3.build(folder, hidden_size=48, num_layers=1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


config = RunConfig(
    name="judged",
    num_steps=12,
    max_staleness=1,
    supervision=SupervisionConfig(silence_s=120, grace_s=120),
    role_groups=hybrid(genrm_replicas=1, scorer_replicas=1),
    model=ModelConfig(build=TINY, build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=words, held_out=4),
    evaluation=EvalConfig(num_prompts=4),
    reward=RewardConfig(function=rule, deadline_s=120),
    genrm=GenrmConfig(
        model=ModelConfig(build=TINY, build_args={"hidden_size": 48, "num_layers": 1, "max_positions": 256}),
        prompt="Q: {prompt} A: {response}",
        parse=verdict,
        weight=0.5,
        max_prompt_tokens=100,
        max_new_tokens=8,
    ),
    scorer=ScorerConfig(model=ModelConfig(build=f"{__file__}:reward_model"), weight=0.5, max_prompt_tokens=100),
    rollout=RolloutConfig(
        prompts_per_step=4, samples_per_prompt=4, max_prompt_tokens=16, max_new_tokens=8, num_slots=16
    ),
    train=TrainConfig(lr=1e-3, micro_batch_tokens=256),
)
