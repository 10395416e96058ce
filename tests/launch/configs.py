"""Config modules for the tests: text that a test writes into a file, whole or with one part changed."""

from __future__ import annotations

from pathlib import Path

WHOLE = """
from rondo.launch.config import RunConfig
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, EvalConfig, RewardConfig, RolloutConfig, TrainConfig


def rows():
    return [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(40)]


def reward(response, label, *, prompt, metadata):
    return float(response == label)


config = RunConfig(
    name="demo",
    num_steps=4,
    role_groups=fully_async(),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32}),
    data=DataConfig(rows=rows, held_out=8),
    evaluation=EvalConfig(num_prompts=8),
    reward=RewardConfig(function=reward),
    rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=4, max_prompt_tokens=16, max_new_tokens=8),
    train=TrainConfig(lr=1e-5),
)
"""


def write(folder: Path, *changes: tuple[str, str], name: str = "demo_config.py") -> Path:
    """Writes the module with each (old, new) replaced once; the old text must be there."""
    text = WHOLE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / name
    file.write_text(text)
    return file
