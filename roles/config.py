"""Settings of what the roles do: data, rewards, algorithm, rollout, training, warm-up, evaluation; together a job.

Owns the fields, their bounds, and which of them contradict each other. Does not own where roles run
(`launch/config.py`) or the shape of the model (`models/config.py`). Imports no torch.

    JobConfig(name="gsm8k", num_steps=150, model=..., data=DataConfig(path="train.jsonl", prompt="question"),
              reward=RewardConfig(function="rewards.py:exact"), rollout=RolloutConfig(prompts_per_step=32, ...))

Invariant: settings that contradict each other, or that could have no effect, are refused with both names and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rondo.comm.config import BusConfig
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.models.media.refs import Kind
from rondo.roles.algorithms import (
    ALGORITHMS,
    Algorithm,
    BatchNormalization,
    KlEstimator,
    Normalizer,
    TisLevel,
    TisMode,
    resolve,
)
from rondo.runtime.config import is_loopback
from rondo.runtime.section import FunctionRef, Section, nearest

Fraction = Annotated[float, Field(gt=0, le=1)]

MIN_FIXED_SLOTS = 4
"""Rows of a float32 product from which a row's bits do not depend on how many there are."""


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {pattern!r} ({error}). Correct it") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_regular)]


class DataConfig(Section):
    """Where prompts come from, and in which order they are taken."""

    path: str | None = None
    """A .jsonl or .parquet file, a folder or glob of them, or a data set of the hub: 'hub:name/split'."""
    rows: FunctionRef | None = None
    """Or a function without arguments that returns the rows: a list or any iterable of dicts."""
    transform: FunctionRef | None = None
    """A function from all rows as they lie (an iterable of dicts) to the rows to use; its result is kept in memory."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (with `apply_chat_template`)."""
    label: str | None = "label"
    """Column that the reward function gets as `label`; None for data without one."""
    metadata: str | None = None
    """Column with a dict that the reward function gets as `metadata`."""
    media_columns: dict[Kind, str] = Field(default_factory=dict)
    """Image, audio or video -> column with one or a list of them: path, URL, data URI, bytes, or Hugging Face's Image and
    Audio. They take the places of <image>, <audio> and <video> in the prompt; of text without these, the beginning."""
    use_audio_in_video: str | None = None
    """Column that says of each row whether its videos bring their sound along; without it `media.use_audio_in_video` does."""
    apply_chat_template: bool = False
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the tokenizer's chat template, such as {"enable_thinking": False}."""
    shuffle: bool = True
    num_passes: int | None = Field(None, ge=1)
    """The run ends after so many passes over the rows, or after num_steps, whichever comes first."""
    limit: int | None = Field(None, ge=1)
    """Only the first rows, before anything is held out."""
    held_out: int = Field(0, ge=0)
    """So many rows, drawn with the run's seed, are never trained on; evaluation takes them."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.rows is None):
            both = self.path is not None
            raise ValueError(
                f"data.path and data.rows must be set one without the other, got {'both' if both else 'neither'}. "
                + ("Remove one" if both else "Set data.path to a file, or data.rows to a function")
            )
        if self.chat_template_args and not self.apply_chat_template:
            raise ValueError(
                "data.chat_template_args must be empty without data.apply_chat_template, "
                f"got {self.chat_template_args!r}. Set data.apply_chat_template to True, or remove them"
            )
        if self.media_columns and not self.apply_chat_template:
            raise ValueError(
                "data.apply_chat_template must be True with data.media_columns, whose places in the prompt the template of the "
                f"model makes, got False with {', '.join(self.media_columns)}. Set it to True"
            )
        if self.limit is not None and self.held_out >= self.limit:
            raise ValueError(
                f"data.held_out must leave rows to train on, got {self.held_out} of data.limit {self.limit}. "
                "Lower data.held_out or raise data.limit"
            )
        return self


class EvalSet(Section):
    """Prompts to measure the policy on, and how they are sampled. What is None is taken from the rollout section."""

    num_prompts: int = Field(256, ge=1)
    data: DataConfig | None = None
    """Prompts of their own; without it the rows that `data.held_out` keeps back."""
    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    """0 takes the most probable token."""
    top_p: Fraction | None = None
    top_k: int | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    solved_from: float = 1.0
    """A sample with at least this reward solves its prompt; pass@k counts these."""
    pass_at: tuple[int, ...] | None = None
    """The k of pass@k: how probable it is that one of k samples solves the prompt. None: 1, 2, 4, ... samples_per_prompt."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> EvalSet:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                "evaluation.samples_per_prompt must be 1 with evaluation.temperature 0, where all samples are equal, "
                f"got {self.samples_per_prompt}. Raise the temperature or take one sample"
            )
        if self.top_k is not None and (self.top_k == 0 or self.top_k < -1):
            raise ValueError(f"evaluation.top_k must be at least 1, or -1 for all tokens, got {self.top_k}. Change it")
        beyond = [k for k in self.pass_at or () if not 1 <= k <= self.samples_per_prompt]
        if beyond:
            raise ValueError(
                f"evaluation.pass_at must hold numbers from 1 to evaluation.samples_per_prompt, {self.samples_per_prompt}, "
                f"got {beyond[0]}. Take more samples, or remove it"
            )
        if self.data is not None and self.data.held_out:
            raise ValueError(
                "evaluation.data.held_out must be 0, since all of these rows are for evaluation, "
                f"got {self.data.held_out}. Remove it"
            )
        return self


class EvalConfig(EvalSet):
    """When and how the policy is measured, by the reward function, on prompts that it is not trained on: one set of them, or
    several with names."""

    at_start: bool = True
    at_end: bool = True
    every: int | None = Field(None, ge=1)
    """Measures the version that every so many steps make, beside the training and never under any other version's weights.
    The replica that measures holds a second copy of the model, and the slab one more slot, for it. With SGLang too that is the
    embedded engine: servers have one version for all their requests."""
    share: float = Field(0.25, gt=0, le=1)
    """Of the engine's time that this may take while there are training samples to generate."""
    num_slots: int = Field(16, ge=4)
    """Sequences that are decoded at once beside the training."""
    sets: dict[str, EvalSet] = Field(default_factory=dict)
    """Name -> prompts and sampling of their own, in the place of the fields above."""

    @model_validator(mode="after")
    def _evaluates_at_all(self) -> EvalConfig:
        if not (self.at_start or self.at_end or self.every):
            raise ValueError(
                "evaluation.at_start or evaluation.at_end must be True, or evaluation.every be set, got none of them. "
                "Set one, or remove the evaluation section"
            )
        for name in EvalSet.model_fields if self.sets else ():
            if getattr(self, name) != EvalSet.model_fields[name].default:
                raise ValueError(
                    f"evaluation.{name} must not be set beside evaluation.sets, which have their own, "
                    f"got {getattr(self, name)!r}. Set evaluation.sets.NAME.{name}"
                )
        for name in self.sets:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise ValueError(
                    f"evaluation.sets must have names of letters, digits, _ and -, got {name!r}. Rename the set"
                )
        for name in ("share", "num_slots") if self.every is None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"evaluation.{name} must not be set without evaluation.every, for which it counts, "
                    f"got {getattr(self, name)}. Set evaluation.every, or remove it"
                )
        return self

    def named_sets(self) -> dict[str, EvalSet]:
        """Name -> set; the only one is called "held_out" where it has no name."""
        return self.sets or {"held_out": self}


class RewardConfig(Section):
    """The reward function and the processes that run it."""

    function: FunctionRef
    """`def reward(response: str, label, *, prompt, metadata) -> float | dict`; a dict holds "score" and what to log."""
    num_workers: int = Field(1, ge=1)
    """Processes for each rollout replica."""
    deadline_s: float = Field(10.0, gt=0)
    """What one call may take; then its process is killed and its sample counts as failed."""
    max_failures: int = Field(2, ge=1)
    """Failed scorings that one prompt group may have; one more puts it into quarantine."""


class AlgorithmConfig(Section):
    """The algorithm and its options. An option that is None keeps what the algorithm stands for."""

    name: str = "grpo"
    clip_low: float | None = Field(None, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of tokens with negative advantage at -dual_clip x advantage."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the loss; 0 needs no reference."""
    kl: KlEstimator = "k3"
    normalize_std: bool | None = None
    """Whether advantages are divided by the standard deviation of their prompt group."""
    normalizer: Normalizer | None = None
    """Mean over samples of token means, mean over tokens, or sum / (samples x max_new_tokens)."""
    normalize_batch: BatchNormalization | None = None
    """Brings the advantages of a whole step to mean 0 and deviation 1, over its tokens or over its samples."""
    old_log_probs: Literal["auto", "self", "actor_fwd", "rollout"] = "auto"
    """pi_old of the ratio: `algorithms.old_log_probs_source` has the rule for auto."""
    tis_low: float | None = Field(None, ge=0)
    tis_high: float | None = Field(None, gt=0)
    """Importance correction, engine against trainer: the loss is weighted with pi_old / pi_rollout within these bounds."""
    tis_mode: TisMode | None = None
    """Beyond the bounds a weight is truncated to them (the default), or masked: 0."""
    tis_level: TisLevel | None = None
    """Whether weights are those of tokens (the default), or of samples: product or geometric mean over their tokens."""

    @model_validator(mode="after")
    def _options_fit_the_algorithm(self) -> AlgorithmConfig:
        if self.name not in ALGORITHMS:
            raise ValueError(
                f"algorithm.name must name an algorithm, got {self.name!r}. {nearest(self.name, list(ALGORITHMS))}"
            )
        for option in ("tis_low", "tis_mode", "tis_level"):
            if getattr(self, option) is not None and self.tis_high is None:
                raise ValueError(
                    f"algorithm.tis_high must be set with algorithm.{option}, got only {option} {getattr(self, option)}. "
                    "Set both"
                )
        if self.tis_high is not None and self.tis_high <= (self.tis_low or 0.0):
            raise ValueError(
                f"algorithm.tis_high must be greater than algorithm.tis_low, got {self.tis_high} and {self.tis_low}. "
                "Exchange them"
            )
        if self.tis_high is not None and self.old_log_probs == "rollout":
            raise ValueError(
                "algorithm.old_log_probs must not be 'rollout' with algorithm.tis_high, whose weights would all be 1, "
                "got both. Remove tis_high, or set old_log_probs to 'self' or 'actor_fwd'"
            )
        resolve(self)
        return self

    def resolved(self) -> Algorithm:
        """The algorithm's record with these options."""
        return resolve(self)


PAUSES: Mapping[str, str] = {"continue": "in_place", "recompute": "retract", "interrupt": "abort"}
"""`rollout.on_new_weights` in the words of SGLang's pause modes."""


class SGLangConfig(Section):
    """SGLang as the rollout engine: servers that each rollout replica starts, or ones that run already."""

    python: str | None = None
    """The interpreter of the server's own environment. The servers are started with it."""
    urls: tuple[str, ...] = ()
    """Or servers that run already ("http://127.0.0.1:30000"); rondo neither starts nor ends these."""
    router: str | None = None
    """A public router (sglang-router, smg) in front of all `urls`, through which requests go; without, rondo spreads them."""
    num_servers: int = Field(1, ge=1)
    """Servers that each rollout replica starts."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices of one server."""
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of the server by their names, such as {"mem-fraction-static": 0.8}; True stands for a flag."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the servers."""
    api_key_file: str | None = None
    """A file with the bearer key of `urls`; servers that rondo starts get a key of their own."""
    weights: Literal["disk", "tensor", "distributed"] = "disk"
    """How new weights reach a server: files, shared memory or CUDA IPC on this node, or a process group."""
    pause: Literal["in_place", "retract", "abort"] = "in_place"
    """What a weight update does to requests in flight: 'in_place' freezes them and goes on with the cache that the old weights
    filled, 'retract' takes them back and computes their cache anew, 'abort' ends them, to be continued as new requests."""
    bucket_bytes: int = Field(256 << 20, ge=1 << 16)
    """Weights of one update call."""
    checksums: bool = True
    """Compares the server's checksums of its weights with ours after every update, while it pauses; without, an update is proved
    by its version alone."""
    release_memory: bool | None = None
    """Servers give their memory back while the trainer of the same process trains, and take it for the next weights; None: where
    they share its device, and the two take turns."""
    start_deadline_s: float = Field(600.0, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> SGLangConfig:
        if (self.python is None) == (not self.urls):
            raise ValueError(
                "sglang.python and sglang.urls must be set one without the other, "
                f"got {'neither' if self.python is None else 'both'}. Set sglang.python to start servers, or sglang.urls"
            )
        return self

    @model_validator(mode="after")
    def _only_own_servers_release_memory(self) -> SGLangConfig:
        if self.release_memory and self.urls:
            raise ValueError(
                "sglang.release_memory must not be True with sglang.urls, whose servers have devices of their own and may answer "
                "others, got True. Remove it"
            )
        return self

    @model_validator(mode="after")
    def _a_router_has_servers_that_are_updated_together(self) -> SGLangConfig:
        if self.router is None:
            return self
        if not self.urls:
            raise ValueError(
                "sglang.router must come with sglang.urls, the servers behind it, which get their weights past it, got none. "
                "Name them, or remove sglang.router: rondo spreads requests over the servers that it starts"
            )
        if self.weights != "disk" or self.checksums:
            raise ValueError(
                "sglang.router must come with sglang.weights 'disk' and sglang.checksums False, since its servers are updated "
                f"with the same calls, got {self.weights!r} and {self.checksums}. Change them, or remove sglang.router"
            )
        return self


class EndpointConfig(Section):
    """An HTTP server on each rollout replica's engine for agents, in OpenAI's and SGLang's words."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """Replica 0 listens here, replica 1 one port further, and so on; 0 takes free ones. `rondo status` says where."""
    token_file: Path | None = None
    """A file (mode 0600) with the token that callers show. Without it they show the run's own, which can also stop the run."""
    max_body_bytes: int = Field(64 << 20, ge=1 << 10)
    max_sessions: int = Field(1024, ge=1)
    """Sessions whose trajectories are kept."""
    max_tokens: int = Field(1 << 24, ge=1)
    """Tokens of all trajectories together, prompts included; the session not used for longest goes first."""
    max_age_s: float = Field(3600.0, gt=0)
    """A session's trajectory goes so long after its last call."""

    @model_validator(mode="after")
    def _other_addresses_need_a_token(self) -> EndpointConfig:
        if not is_loopback(self.host) and self.token_file is None:
            raise ValueError(
                f"rollout.endpoint.token_file must be set when rollout.endpoint.host is not loopback, got host {self.host!r} "
                "without a token. Set it to a file with mode 0600, or the host to '127.0.0.1'"
            )
        return self


class RolloutConfig(Section):
    """What is sampled for a step, and under which limits. Lengths are in tokens."""

    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=1)
    max_prompt_tokens: int = Field(ge=1)
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: Fraction = 1.0
    top_k: int = -1
    """-1 samples from all tokens."""
    stop: tuple[str, ...] = ()
    """Tokens (their text) that end a response, besides the tokenizer's end of sequence."""
    num_slots: int = Field(64, ge=1)
    """Sequences that one engine decodes at once."""
    sglang: SGLangConfig | None = None
    """Generate with SGLang servers; without it the engine inside the rollout process does."""
    endpoint: EndpointConfig | None = None
    """Answers agents over HTTP beside the run's own samples, with its newest weights."""
    filter: Literal["zero_std"] | None = None
    """'zero_std' replaces prompt groups whose rewards are all equal."""
    spare_groups: int = Field(0, ge=0)
    """Prompt groups sampled beyond a step's need; the last to finish are dropped."""
    max_consecutive_filtered: int = Field(1000, ge=1)
    """So many filtered prompt groups in a row end the run."""
    on_new_weights: Literal["continue", "recompute", "interrupt"] = "continue"
    """What becomes of samples in flight when new weights come: 'continue' goes on with the cache that the old ones filled,
    'recompute' fills it anew at once, 'interrupt' hands them back, to be taken up again from where they were."""
    max_interruptions: int | None = Field(None, ge=1)
    """A sample that was recomputed or interrupted so often goes on in place; None: as often as new weights come."""
    mask_old_tokens: bool = False
    """Leaves tokens out of the loss that are older than the newest version among their sample's tokens."""
    lease_deadline_s: float = Field(120.0, gt=0)
    """A prompt group without progress for so long is given to another replica."""
    straggler_deadline_s: float | None = Field(None, gt=0)
    """A prompt group that a step waits for longer than this counts as failed; None waits."""

    @model_validator(mode="after")
    def _limits_make_sense(self) -> RolloutConfig:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"rollout.top_k must be at least 1, or -1 for all tokens, got {self.top_k}. Change it")
        if self.max_interruptions is not None and self.on_new_weights == "continue":
            raise ValueError(
                "rollout.max_interruptions must not be set with rollout.on_new_weights 'continue', which interrupts nothing, "
                f"got {self.max_interruptions}. Set rollout.on_new_weights to 'recompute' or 'interrupt', or remove it"
            )
        if self.sglang is not None and (paused := PAUSES[self.on_new_weights]) != self.sglang.pause:
            raise ValueError(
                f"rollout.sglang.pause must be {paused!r} with rollout.on_new_weights {self.on_new_weights!r}, since a server "
                f"does the same to all its requests, got {self.sglang.pause!r}. Change one of them"
            )
        if self.sglang is not None and self.max_interruptions is not None:
            raise ValueError(
                "rollout.max_interruptions must be None with rollout.sglang, whose servers do not count them, "
                f"got {self.max_interruptions}. Remove it"
            )
        if self.straggler_deadline_s is not None and self.straggler_deadline_s < self.lease_deadline_s:
            raise ValueError(
                "rollout.straggler_deadline_s must be at least rollout.lease_deadline_s, "
                f"got {self.straggler_deadline_s} and {self.lease_deadline_s}. A lost lease needs time to be noticed"
            )
        return self


class TrainConfig(Section):
    """The optimizer (AdamW), its schedule, and how a step is cut into micro-batches."""

    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a part of lr."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-8, gt=0)
    clip_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(4096, ge=1)
    """Prompt and response tokens that one process takes through the model at once; patches and frames of sound that an
    encoder takes count as tokens too."""
    log_prob_chunk_tokens: int = Field(2048, ge=1)
    """Tokens whose logits exist at the same time."""
    activation_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of forward and backward; weights and optimizer keep float32."""
    save_every: int | None = Field(None, ge=1)
    """A checkpoint after every so many steps; the last step always makes one."""
    keep_checkpoints: int = Field(2, ge=1)
    optimizer_steps_per_batch: int = Field(1, ge=1)
    """Optimizer steps in one pass over the prompt groups of a step, which are divided among them in admission order. They all
    belong to one policy version."""
    epochs: int = Field(1, ge=1)
    """Passes over the prompt groups of a step."""
    hot_snapshot: bool = True
    """Keeps the newest version in host memory, so that a restart of the actor loses no committed step."""
    encoders: Literal["replicate", "shard"] = "replicate"
    """Whether each process holds the image, audio and video encoders whole, or a shard of them, apart from the decoder's."""
    freeze: tuple[Literal["language", "vision", "audio", "projector"], ...] = ()
    """Parts of the model that stay as they are."""
    freeze_parameters: tuple[Pattern, ...] = ()
    """Regular expressions; parameters whose name in the model matches one stay as they are."""
    train_parameters: tuple[Pattern, ...] = ()
    """Regular expressions; when given, only parameters that match one, and are not frozen, are trained."""
    max_log_prob_gap: float | None = Field(None, gt=0)
    """The run stops when the mean absolute gap between the log-probs of engine and trainer under the same weights is
    greater in a step, in nats; None only measures it."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> TrainConfig:
        if self.schedule == "constant" and self.min_lr_fraction:
            raise ValueError(
                "train.min_lr_fraction must be 0 with train.schedule 'constant', which never falls, "
                f"got {self.min_lr_fraction}. Set train.schedule to 'linear' or 'cosine', or remove it"
            )
        return self


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations, before the first step of a run or as a job of its own."""

    rows: FunctionRef | None = None
    """A function that returns the demonstrations: dicts with `prompt` and `answer`."""
    data: DataConfig | None = None
    """Or a data set, whose `label` column is the answer."""
    demonstrate: FunctionRef | None = None
    """Or a function `(prompt, label, draw) -> answer` for training rows of the run, called anew each time a row comes;
    `draw` is a seeded random.Random."""
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    """Demonstrations of one optimizer step."""
    lr: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    min_lr_fraction: float = Field(0.1, ge=0, le=1)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad_norm: float = Field(1.0, gt=0)
    micro_batch_tokens: int = Field(4096, ge=1)
    """Also the longest demonstration, in tokens."""
    log_prob_chunk_tokens: int = Field(2048, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> SftConfig:
        given = [name for name in ("rows", "data", "demonstrate") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "exactly one of sft.rows, sft.data and sft.demonstrate must be set, "
                f"got {' and '.join(given) or 'none'}. Name one source of demonstrations"
            )
        if self.data is not None and (self.data.label is None or self.data.held_out):
            raise ValueError(
                "sft.data must name the answer as its label and hold nothing out, "
                f"got label {self.data.label!r} and held_out {self.data.held_out}. Change sft.data"
            )
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"sft.warmup_steps must be less than sft.steps, got {self.warmup_steps} and {self.steps}. Lower it"
            )
        return self

    def source(self) -> DataConfig:
        """The demonstrations as a data set of their own, with the answer as its label. Not of `demonstrate`, whose rows are the
        run's."""
        return self.data or DataConfig(rows=self.rows, prompt="prompt", label="answer")


class JobConfig(Section):
    """Everything that a role needs to do its work, wherever it runs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """Names the run's directory."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    num_steps: int = Field(ge=1)
    max_staleness: int = Field(1, ge=0)
    """In policy versions: how much older than the trained version a sample's oldest token may be. 0 is on-policy."""
    deterministic: bool = False
    """Equal settings train equal samples in equal rounds: at max_staleness 0 to the same bits, in every mode and through
    every death; above it the same prompts in the same order. Costs speed: shapes are fixed, and each process has one thread."""
    model: ModelConfig
    data: DataConfig
    media: MediaConfig | None = None
    """Limits of image, audio and video. None: the rows are text; where `media_columns` are named, the defaults."""
    evaluation: EvalConfig | None = None
    reward: RewardConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig
    train: TrainConfig = TrainConfig()
    sft: SftConfig | None = None
    bus: BusConfig = BusConfig()

    @model_validator(mode="after")
    def _media_follow_the_data(self) -> JobConfig:
        # The field stays "not set", so that `override` derives it anew when the columns change.
        if self.media is None and any(data.media_columns for data in self._data_sections()):
            self.__dict__["media"] = MediaConfig()
        if self.media is not None and self.media.whole_positions is None and self.rollout.sglang is not None:
            # Another object, in which the field stays "not set", so that `override` derives it anew.
            media = self.media.model_copy()
            media.__dict__["whole_positions"] = True
            self.__dict__["media"] = media
        return self

    @model_validator(mode="after")
    def _media_suit_the_engine(self) -> JobConfig:
        sglang = self.rollout.sglang
        if self.media is None or sglang is None:
            return self
        if sglang.urls:
            raise ValueError(
                "media must be None with rollout.sglang.urls, whose servers are sent text alone, got settings of media. Remove "
                "them, or set rollout.sglang.python, so that servers are started which take media"
            )
        if self.media.whole_positions is False:
            raise ValueError(
                "media.whole_positions must not be False with rollout.sglang, whose servers cut positions of videos to whole "
                "numbers, got False. Remove it"
            )
        return self

    @property
    def num_updates(self) -> int:
        """Optimizer steps that make one policy version of the one before."""
        return self.train.optimizer_steps_per_batch * self.train.epochs

    @property
    def on_policy(self) -> bool:
        """Whether every row is first trained on under the version that it was sampled from."""
        return self.max_staleness == 0 and self.train.optimizer_steps_per_batch == 1

    @property
    def can_lend_weights(self) -> bool:
        """Whether an embedded engine in the trainer's own process may generate with the trainer's tensors: they have one dtype,
        and move only when the step has all its samples."""
        embedded, same = self.rollout.sglang is None, self.model.dtype == "float32"
        return embedded and same and self.train.optimizer_steps_per_batch == 1

    def demonstrated(self) -> DataConfig:
        """How the prompts of the warm-up's demonstrations are written."""
        assert self.sft is not None
        return self.data if self.sft.demonstrate is not None else self.sft.source()

    def _data_sections(self) -> list[DataConfig]:
        evaluated = [each.data for each in self.evaluation.named_sets().values()] if self.evaluation is not None else []
        shown = self.sft.data if self.sft is not None else None
        return [data for data in (self.data, *evaluated, shown) if data is not None]

    @property
    def num_pinned(self) -> int:
        """Slots of the weight slab for versions that are being evaluated."""
        return int(self.evaluation is not None and self.evaluation.every is not None)

    @property
    def num_weight_slots(self) -> int:
        """Slots of the weight slab."""
        return self.bus.weight_slots + self.num_pinned

    @model_validator(mode="after")
    def _sections_agree(self) -> JobConfig:
        algorithm, rollout, train = self.algorithm.resolved(), self.rollout, self.train
        if rollout.samples_per_prompt < algorithm.min_group_size:
            raise ValueError(
                f"rollout.samples_per_prompt must be at least {algorithm.min_group_size} with algorithm.name "
                f"{algorithm.name!r}, which compares the samples of a prompt, got {rollout.samples_per_prompt}. "
                "Raise it"
            )
        if algorithm.needs_dynamic_sampling and rollout.filter != "zero_std":
            raise ValueError(
                f"rollout.filter must be 'zero_std' with algorithm.name {algorithm.name!r}, which replaces prompt "
                f"groups of equal rewards, got {rollout.filter!r}. Set it, or set algorithm.name to 'grpo'"
            )
        if train.optimizer_steps_per_batch > rollout.prompts_per_step:
            raise ValueError(
                "train.optimizer_steps_per_batch must be at most rollout.prompts_per_step, since each trains on prompt groups "
                f"of its own, got {train.optimizer_steps_per_batch} and {rollout.prompts_per_step}. Lower it"
            )
        if self.num_updates > 1 and not train.hot_snapshot:
            raise ValueError(
                "train.hot_snapshot must be True with several optimizer steps a step (train.optimizer_steps_per_batch x "
                f"train.epochs = {self.num_updates}), since a step that is stopped between them is undone from it, got False. "
                "Remove it, or make one optimizer step"
            )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if train.micro_batch_tokens < longest:
            raise ValueError(
                "train.micro_batch_tokens must hold the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}, got {train.micro_batch_tokens}. Raise it to {longest}"
            )
        if train.warmup_steps >= self.num_steps:
            raise ValueError(
                "train.warmup_steps must be less than num_steps, "
                f"got {train.warmup_steps} and {self.num_steps}. Lower it"
            )
        evaluation = self.evaluation
        for name, each in evaluation.named_sets().items() if evaluation is not None else ():
            if each.data is None and self.data.held_out < each.num_prompts:
                section = f"evaluation.sets.{name}" if evaluation is not None and evaluation.sets else "evaluation"
                raise ValueError(
                    f"data.held_out must be at least {section}.num_prompts without {section}.data, "
                    f"got {self.data.held_out} and {each.num_prompts}. "
                    f"Set data.held_out to {each.num_prompts}, or name a data set in {section}.data"
                )
        if evaluation is not None and evaluation.every is not None and evaluation.every > self.num_steps:
            raise ValueError(
                f"evaluation.every must be at most num_steps, got {evaluation.every} and {self.num_steps}. Lower it"
            )
        return self

    @model_validator(mode="after")
    def _nothing_depends_on_time(self) -> JobConfig:
        if not self.deterministic:
            return self
        rollout = self.rollout
        if rollout.sglang is not None:
            raise ValueError(
                "deterministic must be False with rollout.sglang, whose batches depend on time, got True. "
                "Remove rollout.sglang, or set deterministic=False"
            )
        if rollout.num_slots < MIN_FIXED_SLOTS:
            raise ValueError(
                f"rollout.num_slots must be at least {MIN_FIXED_SLOTS} with deterministic=True, since fewer rows are multiplied "
                f"in another order, got {rollout.num_slots}. Raise it"
            )
        if rollout.spare_groups:
            raise ValueError(
                "rollout.spare_groups must be 0 with deterministic=True, where no prompt group may win by being quick, "
                f"got {rollout.spare_groups}. Remove it, or set deterministic=False"
            )
        if rollout.straggler_deadline_s is not None:
            raise ValueError(
                "rollout.straggler_deadline_s must be None with deterministic=True, where no prompt group may fail by being "
                f"slow, got {rollout.straggler_deadline_s:g}. Remove it, or set deterministic=False"
            )
        return self

    @classmethod
    def from_resolved(cls, resolved: Mapping[str, Any]) -> JobConfig:
        """The job's part of a run's resolved settings (`config.resolved.json`), which hold placement and more."""
        return cls.model_validate({name: resolved[name] for name in cls.model_fields if name in resolved})
