"""A run with roles, advantages and a loss of its own (`slowed_roles.py`), in which one role after another is the slowest, for PER
steps each.

`python -m tests.e2e.slowed FOLDER`
"""

from __future__ import annotations

import sys
from pathlib import Path

from rondo.launch import train
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.launch.train import TrainOptions
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig

NAME = "slowed"
ORDER = ("rollout", "reward", "reference", "actor_fwd", "actor")
PER = 2
SLOW_S = 0.3
"""Of a prompt group, or a round, from when the trainer waits: its wait is at least as long, whatever the others take."""
OWN = "tests.e2e.slowed_roles"
SLOW = {"rollout": "SlowRollout", "reference": "SlowReference", "actor_fwd": "SlowActorForward", "actor": "SlowActor"}


def slow_at(step: int) -> str:
    """Nobody in the first steps, in which libraries do for the first time what they do quicker later."""
    return ("", *ORDER)[min(step // PER, len(ORDER))]


def steps_of(role: str) -> str:
    """As `rondo explain --steps` takes them."""
    first = PER * (1 + ORDER.index(role))
    return f"{first}:{first + PER}"


def config_of(folder: Path) -> RunConfig:
    return RunConfig(
        name=NAME,
        run_dir=folder,
        num_steps=PER * (1 + len(ORDER)),
        roles={role: f"{OWN}:{name}" for role, name in SLOW.items()},
        max_staleness=0,  # a step's groups begin when the step before is trained: no slow role reaches into another's steps
        role_groups=fully_async(reference_replicas=1, actor_fwd_replicas=1),
        model=ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 1}),
        data=DataConfig(rows="tests.e2e.updates:words"),
        reward=RewardConfig(function="tests.e2e.updates:parity"),
        algorithm=AlgorithmConfig(
            kl_coef=0.01, old_log_probs="actor_fwd", advantage=f"{OWN}:by_token", policy_loss=f"{OWN}:plain"
        ),
        rollout=RolloutConfig(
            prompts_per_step=2, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=4, num_slots=8
        ),
        train=TrainConfig(lr=1e-4, micro_batch_tokens=64),
    )


if __name__ == "__main__":
    config = config_of(Path(sys.argv[1]))
    sys.exit(train.main(config, TrainOptions(Path(__file__), plain=True)))
