"""A run on words, on two replicas, with two evaluated sets every fourth step, samples that new weights interrupt, a reward that
raises for one row and hangs for another; its function after each save fails once. For the tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rondo.launch.config import RunConfig
from rondo.launch.modes import hybrid
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AfterSaveConfig,
    BestConfig,
    DataConfig,
    EvalConfig,
    EvalSet,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from rondo.runtime.config import SupervisionConfig


def words() -> list[dict[str, str]]:
    return [{"prompt": f"{n}>", "label": str(n)} for n in range(40)]


def other_words() -> list[dict[str, str]]:
    return [{"prompt": f"{n}?", "label": str(n)} for n in range(4)]


async def moody(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """Waits for ever, or not at all: its deadline meets what hangs alone, however busy the machine."""
    if label == "5":
        raise ZeroDivisionError("five")
    if label == "13":
        await asyncio.Event().wait()
    if prompt.endswith("?"):
        return float(int(label) % 2)
    return float(len(response) % 2)


async def decides(samples: list[dict[str, object]]) -> bool:
    return {"length", "stop"} >= {sample["finish_reason"] for sample in samples}


def saved(path: str, step: int) -> None:
    (Path(path).parent.parent / f"saw_{step}").mkdir()
    if step == 4:
        raise OSError("no bucket")


config = RunConfig(
    name="evaluated",
    num_steps=8,
    max_staleness=2,
    supervision=SupervisionConfig(silence_s=120, grace_s=120),
    role_groups=hybrid(rollout_replicas=2),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=words, shuffle=False, held_out=4),
    evaluation=EvalConfig(
        at_start=False,
        at_end=True,  # by both replicas, a part each
        every=4,
        num_slots=4,
        sets={
            "kept": EvalSet(num_prompts=4, samples_per_prompt=4),
            "own": EvalSet(num_prompts=4, data=DataConfig(rows=other_words), temperature=0, max_new_tokens=3),
        },
    ),
    reward=RewardConfig(function=moody, deadline_s=3.0),
    rollout=RolloutConfig(
        prompts_per_step=4, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=48, num_slots=2,
        on_new_weights="interrupt", max_interruptions=1, mask_old_tokens=True,
        stop=("ab",), keep=decides, mask_truncated=True,
    ),
    train=TrainConfig(
        lr=1e-4, micro_batch_tokens=128, save_every=4, keep_checkpoints=1, best=BestConfig(metric="own.mean@1"),
        after_save=AfterSaveConfig(function=saved),
    ),
)  # fmt: skip
