"""Settings of training: optimizer and micro-batches, and the warm-up on demonstrations.

Owns their bounds. Does not own the algorithm (`roles/algorithms/algorithm.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rondo.models.config import MeshConfig
from rondo.roles.config.data import DataConfig
from rondo.runtime.section import FunctionRef, Section


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {pattern!r} ({error}). Correct it") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_regular)]


Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


class OptimizerConfig(Section):
    """An optimizer (AdamW), its schedule, and how much goes through the model at once."""

    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a part of lr."""
    betas: Betas = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-8, gt=0)
    clip_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(4096, ge=1)
    """Prompt and response tokens that one process takes through the model at once; patches and frames of sound that an
    encoder takes count as tokens too."""
    log_prob_chunk_tokens: int = Field(2048, ge=1)
    """Tokens whose logits exist at the same time."""


class BestConfig(Section):
    """Which checkpoint is the best."""

    place = "train.best"
    metric: str = Field(min_length=1)
    """A figure of the evaluations as a run prints it, "pass@1", or "math.pass@1" of one of several sets; or a metric of every
    step, such as "reward_mean"."""
    mode: Literal["max", "min"] = "max"


class AfterSaveConfig(Section):
    """A function of the user's that every whole checkpoint is handed to, such as an upload."""

    place = "train.after_save"
    function: FunctionRef
    """`def saved(path: str, step: int) -> None`, in a process of its own on the node that the run is started on."""
    deadline_s: float = Field(3600.0, gt=0)
    """What one call may take; then its process is killed, and the run goes on."""


class TrainConfig(OptimizerConfig):
    """The optimizer of the policy, and how a step is cut into updates and micro-batches."""

    mesh: MeshConfig = MeshConfig()
    """How the processes that train share copies of the model."""
    activation_checkpointing: bool = False
    """Layers keep their inputs alone, and are computed again in the backward."""
    compile: bool = False
    """The decoder's layers run as torch.compile makes them."""
    offload_optimizer: bool = False
    """Adam's moments, 8 bytes a parameter, lie in host memory, and pass through the device once an optimizer step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of forward and backward; weights and optimizer keep float32. "auto" is bfloat16 where the actor has devices, else float32.
    With float16 the loss is scaled, and an update whose gradient overflows is skipped."""
    save_every: int | None = Field(None, ge=1)
    """A checkpoint after every so many steps; the last step always makes one."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest ones that stay."""
    best: BestConfig | None = None
    """Keeps the best checkpoint, too."""
    after_save: AfterSaveConfig | None = None
    wait_for_room_s: float = Field(21_600.0, ge=0)
    """How long the last save waits for room on a full disk before the run ends without it. One during the run waits beside the
    training until its snapshot's place is needed, or the next is due."""
    optimizer_steps_per_batch: int = Field(1, ge=1)
    """Optimizer steps in one pass over the prompt groups of a step, which are divided among them in admission order. They all
    belong to one policy version."""
    epochs: int = Field(1, ge=1)
    """Passes over the prompt groups of a step."""
    hot_snapshot: bool = True
    """Keeps the newest version in host memory, so that a restart of the actor loses no committed step."""
    release_memory: bool | None = None
    """Weights, moments and gradients leave their device for host memory while the engine generates in turn with the training,
    which then begins when a step has all its samples. None: where the two share an accelerator."""
    encoders: Literal["replicate", "shard"] = "replicate"
    """Whether each process holds the image, audio and video encoders whole, or a shard of them, apart from the decoder's."""
    freeze: tuple[Literal["language", "vision", "audio", "projector"], ...] = ()
    """Parts of the model that stay as they are."""
    freeze_parameters: tuple[Pattern, ...] = ()
    """Regular expressions; parameters whose name in the model matches one stay as they are."""
    train_parameters: tuple[Pattern, ...] = ()
    """Regular expressions; when given, only parameters that match one, and are not frozen, are trained."""
    router_replay: bool = False
    """Of a mixture of experts: the engine records which experts every token was sampled with, and the trainer sends it to the
    same ones, with weights of its own."""
    max_log_prob_gap: float | None = Field(None, gt=0)
    """The run stops when the mean absolute gap between the log-probs of engine and trainer under the same weights is
    greater in a step, in nats; None only measures it."""

    def refused(self) -> Iterator[str]:
        if self.best is not None and self.save_every is None:
            yield (
                "train.save_every must be set with train.best, which chooses among a run's checkpoints, got None. Set it, or "
                "remove train.best"
            )
        if self.schedule == "constant" and self.min_lr_fraction:
            yield (
                "train.min_lr_fraction must be 0 with train.schedule 'constant', which never falls, "
                f"got {self.min_lr_fraction}. Set train.schedule to 'linear' or 'cosine', or remove it"
            )


class SftConfig(OptimizerConfig):
    """Supervised fine-tuning on demonstrations, before the first step of a run or as a job of its own."""

    rows: FunctionRef | None = None
    """A function that returns the demonstrations: dicts with `prompt` and `answer`. Prompts are written like those of
    `data`."""
    data: DataConfig | None = None
    """Or a data set, whose `label` column is the answer; with label=None the last message of its prompts is."""
    demonstrate: FunctionRef | None = None
    """Or a function `(prompt, label, draw) -> answer` for training rows of the run, called anew each time a row comes;
    `draw` is a seeded random.Random."""
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    """Demonstrations of one optimizer step."""
    lr: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    min_lr_fraction: float = Field(0.1, ge=0, le=1)
    betas: Betas = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    micro_batch_tokens: int = Field(4096, ge=1)
    """Also the longest demonstration, in tokens."""

    def refused(self) -> Iterator[str]:
        given = [name for name in ("rows", "data", "demonstrate") if getattr(self, name) is not None]
        if len(given) != 1:
            yield (
                "exactly one of sft.rows, sft.data and sft.demonstrate must be set, "
                f"got {' and '.join(given) or 'none'}. Name one source of demonstrations"
            )
        if self.data is not None and self.data.held_out:
            yield f"sft.data.held_out must be 0, got {self.data.held_out}. Remove it"
        if self.data is not None and self.data.label is None and not self.data.apply_chat_template:
            yield (
                "sft.data.label must name the answer, or be None where sft.data.apply_chat_template is True and the last message "
                "of a prompt is its answer, got None without it. Set one of them"
            )
        if self.warmup_steps >= self.steps:
            yield f"sft.warmup_steps must be less than sft.steps, got {self.warmup_steps} and {self.steps}. Lower it"

    def source(self, prompts: DataConfig) -> DataConfig:
        """The demonstrations as a data set, with the answer as its label. `prompts` are the run's: `rows` are written as they
        are, and those of `demonstrate` are they."""
        if self.data is not None:
            return self.data
        if self.rows is None:
            return prompts
        same = {name: getattr(prompts, name) for name in DataConfig.OF_PROMPTS}
        return DataConfig(rows=self.rows, prompt="prompt", label="answer", **same)
