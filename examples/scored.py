"""Rewards from a reward model alone: two CPU cores, no downloads, about four minutes. The quick start's model learns to sort from
what another says of its answers; no function knows what is right.

    rondo train examples/scored.py
    rondo eval runs/scored --config examples/quickstart.py        # how many answers are right

The reward model is trained first, on the pairs of `examples/reward_model.py`, of which one answer has a wrong digit; any folder
that job "reward_model" has written is as good, or one from the hub.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from quickstart import config as quick
from quickstart_lora import base
from reward_model import config as learns

from rondo.launch.config import RunConfig, override
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import ScorerConfig


def reward_model(folder: Path, steps: int, base_steps: int = 120) -> None:
    """Writes a model that tells a sorted answer from one that is not."""
    from rondo.roles.training.warm_up import open_learning

    with TemporaryDirectory() as fresh:
        base(Path(fresh), base_steps)
        learnt = override(learns, [f"reward_model.steps={steps}", f"reward_model.warmup_steps={min(5, steps // 2)}"])
        backend, learn = open_learning(learnt, fresh, Path(fresh), world_size=1, device="cpu")
        learning = learn(0)
        for step in range(steps):
            learning.step(step)
        folder.rmdir()
        backend.export(folder, fresh)


config = RunConfig(
    **{name: getattr(quick, name) for name in ("data", "evaluation", "model", "algorithm", "rollout", "train", "sft")},
    name="scored",
    num_steps=100,
    max_staleness=1,
    role_groups=fully_async(reference_replicas=1, actor_fwd_replicas=1, scorer_replicas=1),
    scorer=ScorerConfig(model=ModelConfig(build=reward_model, build_args={"steps": 120}), max_prompt_tokens=2048),
)
