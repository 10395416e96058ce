"""Settings of training on samples: the optimizer, how a step is cut into micro-batches, the reference and the critic.

Owns their bounds. Does not own the algorithm (`roles/algorithms/algorithm.py`), nor what is learnt from rows
(`roles/config/supervised.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rondo.models.config import LoraConfig, MeshConfig
from rondo.runtime.section import FREE, FunctionRef, Section, fixed


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {pattern!r} ({error}). Correct it") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_regular)]


Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


OF_TENSORS = fixed("its checkpoint holds the tensors of that model and their moments")


class OptimizerConfig(Section):
    """An optimizer (AdamW), its schedule, and how much goes through the model at once."""

    lr: float = Field(1e-6, gt=0)
    """The learning rate, after its warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a part of lr."""
    betas: Betas = (0.9, 0.95)
    """Of Adam's two moments."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, decoupled from the gradient."""
    eps: float = Field(1e-8, gt=0)
    """Adam's, beside the root of the second moment."""
    clip_grad_norm: float = Field(1.0, gt=0)
    """A longer gradient is shortened to this norm."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Prompt and response tokens that one process takes through the model at once; patches and frames of sound that an
    encoder takes count as tokens too."""
    log_prob_chunk_tokens: Annotated[int, FREE] = Field(2048, ge=1)
    """Tokens whose logits exist at the same time."""


class BestConfig(Section):
    """Which checkpoint is the best."""

    place = "train.best"
    metric: str = Field(min_length=1)
    """A figure of the evaluations as a run prints it, "pass@1", or "math.pass@1" of one of several sets; or a metric of every
    step, such as "reward_mean"."""
    mode: Literal["max", "min"] = "max"
    """Whether the greatest or the least of that figure is the best."""


class AfterSaveConfig(Section):
    """A function of the user's that every whole checkpoint is handed to, such as an upload."""

    place = "train.after_save"
    function: FunctionRef
    """`def saved(path: str, step: int) -> None`, in a process of its own on the node that the run is started on."""
    deadline_s: float = Field(3600.0, gt=0)
    """What one call may take; then its process is killed, and the run goes on."""


class TrainConfig(OptimizerConfig):
    """The optimizer of the policy, and how a step is cut into updates and micro-batches."""

    mesh: Annotated[MeshConfig, FREE] = MeshConfig()
    """How the processes that train share copies of the model."""
    activation_checkpointing: Annotated[bool, FREE] = False
    """Layers keep their inputs alone, and are computed again in the backward."""
    compile: bool = False
    """The decoder's layers run as torch.compile makes them."""
    offload_optimizer: Annotated[bool, FREE] = False
    """Adam's moments, 8 bytes a parameter, lie in host memory, and pass through the device once an optimizer step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of forward and backward; weights and optimizer keep float32. "auto" is bfloat16 where the actor has devices, else float32.
    With float16 the loss is scaled, and an update whose gradient overflows is skipped."""
    save_every: Annotated[int | None, FREE] = Field(None, ge=1)
    """A checkpoint after every so many steps; the last step always makes one."""
    keep_checkpoints: Annotated[int, FREE] = Field(2, ge=1)
    """The newest ones that stay."""
    best: Annotated[BestConfig | None, FREE] = None
    """Keeps the best checkpoint, too."""
    after_save: Annotated[AfterSaveConfig | None, FREE] = None
    before_step: FunctionRef | None = None
    """`def begins(step: int) -> None`, in every process of the actor before each step that trains the policy."""
    after_step: FunctionRef | None = None
    """`def ended(step: int, metrics: dict) -> dict | None`, there and after each, before it is committed; numbers that it returns
    in process 0 are metrics of the step too."""
    wait_for_room_s: Annotated[float, FREE] = Field(21_600.0, ge=0)
    """How long the last save waits for room on a full disk before the run ends without it. One during the run waits beside the
    training until its snapshot's place is needed, or the next is due."""
    num_mini_batches: int = Field(1, ge=1)
    """Number of mini-batches that the prompt groups of a step are divided into, in admission order; each gives one optimizer step
    of every pass. All of these steps belong to one policy version."""
    passes: int = Field(1, ge=1)
    """Number of passes over the prompt groups of one step (PPO epochs). `data.num_passes` counts passes over the data set."""
    hot_snapshot: Annotated[bool, FREE] = True
    """Keeps the newest version in host memory, so that a restart of the actor loses no committed step."""
    release_memory: Annotated[bool | None, FREE] = None
    """Weights, moments and gradients leave their device for host memory while the engine generates in turn with the training,
    which then begins when a step has all its samples. None: where the two share an accelerator."""
    encoders: Annotated[Literal["replicate", "shard"], FREE] = "replicate"
    """Whether each process holds the image, audio and video encoders whole, or a shard of them, apart from the decoder's."""
    freeze: Annotated[tuple[Literal["language", "vision", "audio", "projector"], ...], OF_TENSORS] = ()
    """Parts of the model that stay as they are."""
    freeze_parameters: Annotated[tuple[Pattern, ...], OF_TENSORS] = ()
    """Regular expressions; parameters whose name in the model matches one stay as they are."""
    train_parameters: Annotated[tuple[Pattern, ...], OF_TENSORS] = ()
    """Regular expressions; when given, only parameters that match one, and are not frozen, are trained."""
    lora: Annotated[LoraConfig | None, OF_TENSORS] = None
    """Adapters are trained, and the model's own weights stay as they are, in `dtype`. None: the weights are."""
    router_replay: Literal["off", "r2", "r3"] = "off"
    """Of a mixture of experts: every token goes to recorded experts, with weights of the trainer's own. "r3": those that the
    engine sampled it with. "r2": those of the forward behind its old log-probs, actor_fwd's or the trainer's first in a step."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of transformers and the Switch Transformer, of each micro-batch of a process."""
    router_bias_update_rate: float = Field(0.0, ge=0)
    """Of a model whose routers have a correction bias: what an optimizer step adds to that of experts with less than the mean of
    all tokens of the update, and takes from the others'."""
    max_log_prob_gap: Annotated[float | None, FREE] = Field(None, gt=0)
    """The run stops when the mean absolute gap between the log-probs of engine and trainer under the same weights is
    greater in a step, in nats; None only measures it, but for adapters that both compute in float32, of which an engine that
    keeps an older one is found by 0.001."""

    def refused(self) -> Iterator[str]:
        if self.best is not None and self.save_every is None:
            yield (
                "train.save_every must be set with train.best, which chooses among a run's checkpoints, got None. Set it, or "
                "remove train.best"
            )
        for name in ("freeze", "freeze_parameters", "train_parameters"):
            if self.lora is not None and getattr(self, name):
                yield (
                    f"train.{name} must be empty with train.lora, which trains adapters alone, got {getattr(self, name)}. Remove "
                    "it, and choose with train.lora.targets"
                )
        if self.lora is not None and self.router_bias_update_rate:
            yield (
                "train.router_bias_update_rate must be 0 with train.lora, which trains adapters alone, got "
                f"{self.router_bias_update_rate:g}. Remove it"
            )
        if self.schedule == "constant" and self.min_lr_fraction:
            yield (
                "train.min_lr_fraction must be 0 with train.schedule 'constant', which never falls, "
                f"got {self.min_lr_fraction}. Set train.schedule to 'linear' or 'cosine', or remove it"
            )


class ReferenceConfig(Section):
    """The policy that the KL is measured from."""

    place = "reference"
    refresh_every: int | None = Field(None, ge=1)
    """The reference becomes the actor again every so many versions, with the first that it gets from there on; None: it stays
    what the run began with."""


class CriticConfig(OptimizerConfig):
    """The critic: its weights, its optimizer, and how it learns values. What is not here is as in `train`, and so is a
    `micro_batch_tokens` that is not set."""

    path: Annotated[str | None, OF_TENSORS] = None
    """A Hugging Face folder with weights to begin with, of the policy's vocabulary; a `score.weight` in it, as reward models
    have, is its value head. None: the policy's own, with a head drawn anew."""
    lr: float = Field(1e-5, gt=0)
    mesh: Annotated[MeshConfig, FREE] = MeshConfig()
    """How the processes that train it share copies of it."""
    lora: Annotated[LoraConfig | None, OF_TENSORS] = None
    """Adapters of its own are trained, and its head whole, beside weights that stay as they are; None: all of its weights are,
    also with `train.lora`."""
    only_steps: int = Field(0, ge=0)
    """Steps at the start that train the critic alone: the policy stays as it is."""
    passes: int | None = Field(None, ge=1)
    """Passes over the prompt groups of a step; None: `train.passes`."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far from the value before the step a value may move before its loss has no gradient further; None bounds nothing."""

    def refused(self) -> Iterator[str]:
        if self.schedule == "constant" and self.min_lr_fraction:
            yield (
                "critic.min_lr_fraction must be 0 with critic.schedule 'constant', which never falls, "
                f"got {self.min_lr_fraction}. Set critic.schedule to 'linear' or 'cosine', or remove it"
            )
        for name, got in self.lora.changed("dropout", "publish").items() if self.lora is not None else ():
            yield (
                f"critic.lora.{name} must be left out, since values are neither published nor computed with noise, got "
                f"{got!r}. Remove it"
            )
