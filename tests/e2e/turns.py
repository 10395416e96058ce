"""A run of episodes with a slow environment that writes down each call, for deaths in the middle of them.

`calls.jsonl` of the folder that the run starts in has [episode, turn, what was said] of each: an episode keeps its name in its
snapshot, so the same call of the same episode is there twice where a death came before its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from typing import Any

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, EnvironmentConfig, RolloutConfig, SamplesConfig, TrainConfig
from rondo.roles.sampling.environments import Step
from rondo.runtime.config import SupervisionConfig

TURNS, SLOW_S = 6, 0.25


class Slow:
    async def reset(self) -> None:
        self.name, self.turn = uuid.uuid4().hex, 0

    async def step(self, said: str) -> Step:
        line = json.dumps([self.name, self.turn, said]).encode() + b"\n"
        file = os.open("calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line)
        os.close(file)
        await asyncio.sleep(SLOW_S)
        self.turn += 1
        return Step("ok;", reward=len(said) / 8, over=self.turn == TURNS)

    async def snapshot(self) -> Any:
        return self.name, self.turn

    async def restore(self, state: Any) -> None:
        self.name, self.turn = state


def words() -> list[dict[str, str]]:
    return [{"prompt": f"{number}:"} for number in range(64)]


config = RunConfig(
    name="turns",
    num_steps=8,
    max_staleness=1,
    supervision=SupervisionConfig(silence_s=120, grace_s=120),
    role_groups=fully_async(rollout_replicas=2),
    model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
    data=DataConfig(rows=words, label=None),
    samples=SamplesConfig(keep=1),
    rollout=RolloutConfig(
        prompts_per_step=8,
        samples_per_prompt=8,
        max_prompt_tokens=8,
        max_new_tokens=240,
        max_turns=TURNS,
        stop=tuple("abcdefghijklmnopqrstuvwxyz"),
        environment=EnvironmentConfig(factory=Slow),
        num_slots=64,
    ),
    train=TrainConfig(micro_batch_tokens=4096, save_every=2),
)
