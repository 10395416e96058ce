"""Quick start with adapters: two CPU cores, no downloads. The base has learnt the task badly and stays as it is; beside it
adapters of rank 16 learn to sort four digits.

    rondo train examples/quickstart_lora.py

Task, reward and algorithm are those of `examples/quickstart.py`. Engines get the adapters alone, a small part of the model, and
the reference of the KL is the base, which the trainer has: no process is there for it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from quickstart import config as quickstart
from quickstart import demonstrations, puzzles

from rondo.launch.config import RunConfig, override
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import LoraConfig, TrainConfig


def taught() -> list[dict[str, str]]:
    """The quick start's demonstrations, of which nine in ten hold a wrong digit, and as many of digits to copy, all right:
    {"prompt": "c3142>", "answer": "3142"}. They teach the output layer, which has no adapter, to be sure."""
    copies = [{"prompt": row["prompt"].replace("s", "c"), "answer": row["prompt"][1:-1]} for row in puzzles(15360, 3)]
    return [row for pair in zip(demonstrations(), copies, strict=True) for row in pair]


def base(folder: Path, steps: int) -> None:
    """A tiny Qwen3 that can copy four digits, and sort them badly."""
    from rondo.models.tiny import qwen3
    from rondo.roles.training.warm_up import open_supervised, train_on_demonstrations

    with TemporaryDirectory() as fresh:
        qwen3.build(Path(fresh), **quickstart.model.build_args)
        learns = override(quickstart, [f"sft.steps={steps}", f"sft.warmup_steps={steps // 6}"])
        learns = learns.model_copy(update={"sft": learns.sft.model_copy(update={"rows": taught})})
        backend = open_supervised(learns, fresh, steps, world_size=1, device="cpu")
        train_on_demonstrations(lambda _: backend, learns, fresh, lambda _: None, lambda: False)
        folder.rmdir()
        backend.export(folder, fresh)


config = RunConfig(
    name="quickstart_lora",
    num_steps=150,
    max_staleness=1,
    role_groups=fully_async(actor_fwd_replicas=1),
    model=ModelConfig(build=base, build_args={"steps": 120}),
    data=quickstart.data,
    evaluation=quickstart.evaluation,
    reward=quickstart.reward,
    algorithm=quickstart.algorithm,
    rollout=quickstart.rollout,
    train=TrainConfig(lr=2e-3, warmup_steps=5, micro_batch_tokens=4096, lora=LoraConfig(rank=16)),
)
