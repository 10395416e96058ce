"""Two CPU cores, no downloads, about three minutes: the quick start's tiny model learns from a teacher four times its size.

    rondo train examples/on_policy_distillation.py
    rondo train examples/on_policy_distillation.py --set distillation.task_coef=1.0                 # and from rewards
    rondo train examples/on_policy_distillation.py --set distillation.form=loss \\
        --set distillation.support=teacher --set distillation.top_k=8 --set distillation.divergence=jsd

The teacher is trained first, on right answers, and written as a Hugging Face folder; any folder with the policy's tokenizer is
as good, such as one that `rondo export` wrote. The policy begins as in quickstart.py, with a warm-up on wrong answers. Then it
samples, and the teacher says of every token how probable it would have been: no reward trains it, which is measured all the same.
"""

from __future__ import annotations

from pathlib import Path

from quickstart import config as quick
from quickstart import puzzles

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DistillationConfig, TeacherConfig


def train_teacher(folder: Path, hidden_size: int = 192, num_layers: int = 3, steps: int = 300) -> None:
    """Writes a model that sorts, with its tokenizer, into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rondo.models.tiny import qwen3

    qwen3.build(folder, hidden_size=hidden_size, num_layers=num_layers)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    texts = [f"{row['prompt']}{row['label']}{tokenizer.eos_token}" for row in puzzles(128 * steps, seed=7)]
    tokens = torch.tensor(tokenizer(texts)["input_ids"])
    labels = tokens.clone()
    labels[:, : len(puzzles(1)[0]["prompt"])] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for part, wanted in zip(tokens.split(128), labels.split(128), strict=True):
        model(input_ids=part, labels=wanted).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


config = RunConfig(
    **{name: getattr(quick, name) for name in ("data", "evaluation", "model", "reward", "rollout", "train", "sft")},
    name="on_policy_distillation",
    num_steps=60,
    max_staleness=1,
    role_groups=fully_async(teacher_replicas=1),
    algorithm=AlgorithmConfig(name="grpo", loss_aggregation="token"),
    distillation=DistillationConfig(teacher=TeacherConfig(model=ModelConfig(build=train_teacher)), task_coef=0.0),
)
