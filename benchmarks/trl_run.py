"""rondo's side of `benchmarks/trl.py`: one whole run, as `rondo train` makes it, with the length of every answer given.

Owns the settings of that run, and a rollout role that differs from the ordinary one in one thing: a request asks for
as many tokens as the list says and stops at nothing else. Everything else is what users run: supervisor, coordinator, torchrun,
bus, weights, reward workers, checkpoint at the end.

    python -m benchmarks.trl_run '{"model": "...", "run_dir": "...", "load": "equal", "mode": "fully_async", ...}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import trl_task as task
from rondo.launch import modes
from rondo.launch.config import RunConfig
from rondo.launch.groups import RoleGroup
from rondo.launch.plan import ROLE_CLASSES, group_specs
from rondo.launch.train import TrainOptions
from rondo.launch.train import main as train
from rondo.models.config import ModelConfig
from rondo.models.media.inputs import MediaInputs
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease, PromptGroups
from rondo.runtime.supervision.spec import GroupSpec

LOAD, STEPS = "RONDO_BENCH_LOAD", "RONDO_BENCH_STEPS"
"""Of the environment: which length list, and for how many steps there are prompts."""


class ListedGroups(PromptGroups):
    """Prompt groups whose answers have the lengths of the list."""

    def _request(
        self, lease: Lease, number: int, prompt: Any, media: MediaInputs | None, params: SamplingParams
    ) -> Request:
        length = task.answer_lengths(os.environ[LOAD], lease.position)[number]
        forced = dataclasses.replace(params, max_new_tokens=length, stop_token_ids=())
        return super()._request(lease, number, prompt, media, forced)


class ListedRollout(RolloutRole):
    open_groups = ListedGroups


def sums() -> list[dict[str, str]]:
    return [{"prompt": text, "label": answer} for text, answer in task.sums(int(os.environ[STEPS]))]


def rows() -> list[dict[str, str]]:
    return [{"prompt": prompt} for prompt in task.prompts(int(os.environ[STEPS]))]


def groups_of(mode: str, threads: int) -> tuple[RoleGroup, ...]:
    """The role groups of a mode; `threads` is that of the group that trains."""
    if mode == "colocate":
        return modes.colocate(threads=threads)
    return modes.hybrid(threads=threads) if mode == "hybrid" else modes.fully_async(actor_threads=threads)


def config_of(spec: dict[str, Any]) -> RunConfig:
    if forced := spec["load"] != task.PRETRAINED:
        data = DataConfig(rows="benchmarks.trl_run:rows", label=None, shuffle=False)
    else:
        data = DataConfig(rows="benchmarks.trl_run:sums", apply_chat_template=True, shuffle=False)
    return RunConfig(
        name="trl",
        num_steps=spec["steps"],
        max_staleness=spec["staleness"],
        role_groups=groups_of(spec["mode"], spec["threads"]),
        run_dir=Path(spec["run_dir"]),
        model=ModelConfig(path=spec["model"], dtype=spec["dtype"]),
        data=data,
        reward=RewardConfig(function=f"benchmarks.trl_task:{'reward' if forced else 'sum_reward'}"),
        algorithm=AlgorithmConfig(name="grpo"),
        rollout=RolloutConfig(
            prompts_per_step=task.NUM_PROMPTS,
            samples_per_prompt=task.NUM_SAMPLES,
            max_prompt_tokens=task.NUM_PROMPT_TOKENS if forced else task.NUM_CHAT_TOKENS,
            max_new_tokens=task.longest(spec["load"]),
            num_slots=spec["num_slots"],
        ),
        train=TrainConfig(
            lr=spec["lr"], micro_batch_tokens=spec["micro_batch_tokens"], dtype=spec["dtype"], betas=(0.9, 0.95)
        ),
    )


def main(spec: dict[str, Any]) -> int:
    os.environ |= {LOAD: spec["load"], STEPS: str(spec["steps"] + 2)}
    config = config_of(spec)
    specs = group_specs(config)
    if spec["load"] != task.PRETRAINED:
        specs = tuple(map(listed, specs))
    return train(config, TrainOptions(Path(__file__), plain=True), groups=specs)


def listed(group: GroupSpec) -> GroupSpec:
    """The same group with our rollout in place of the ordinary one."""
    own = "benchmarks.trl_run:ListedRollout"
    roles = tuple(own if role == ROLE_CLASSES["rollout"] else role for role in group.roles)
    return dataclasses.replace(group, roles=roles)


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
