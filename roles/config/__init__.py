"""Settings of what the roles do: data, rewards, algorithm, rollout, training, warm-up, evaluation; together a job.

Owns the fields, their bounds, and which of them contradict each other. Does not own where roles run
(`launch/config.py`) or the shape of the model (`models/config.py`). Imports no torch.

    JobConfig(name="gsm8k", num_steps=150, model=..., data=DataConfig(path="train.jsonl", prompt="question"),
              reward=RewardConfig(function="rewards.py:exact"), rollout=RolloutConfig(prompts_per_step=32, ...))

Invariant: settings that contradict each other, or that could have no effect, are refused with both names and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from rondo.comm.bus.config import BusConfig
from rondo.models.config import MeshConfig, ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.algorithms.algorithm import AlgorithmConfig, OldLogProbs, old_log_probs_source
from rondo.roles.config.data import DataConfig, EvalConfig, EvalSet, RewardConfig
from rondo.roles.config.presets import full_size
from rondo.roles.config.rollout import MIN_FIXED_SLOTS, EndpointConfig, RolloutConfig, SGLangConfig
from rondo.roles.config.training import AfterSaveConfig, BestConfig, OptimizerConfig, SftConfig, TrainConfig
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.section import Section

__all__ = [
    "MIN_FIXED_SLOTS",
    "AfterSaveConfig",
    "AlgorithmConfig",
    "BestConfig",
    "DataConfig",
    "EndpointConfig",
    "EvalConfig",
    "EvalSet",
    "JobConfig",
    "MeshConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "SGLangConfig",
    "SftConfig",
    "TrainConfig",
    "full_size",
]


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
    supervision: SupervisionConfig = SupervisionConfig()

    def derive(self) -> None:
        # The field stays "not set", so that `override` derives it anew when the columns change.
        if self.media is None and any(data.media_columns for data in self.named_data().values()):
            self.__dict__["media"] = MediaConfig()
        if self.media is not None and self.media.whole_positions is None and self.rollout.sglang is not None:
            # Another object, in which the field stays "not set", so that `override` derives it anew.
            media = self.media.model_copy()
            media.__dict__["whole_positions"] = True
            self.__dict__["media"] = media

        for name, role in (("model", "rollout"), ("train", "actor")):
            section = getattr(self, name)
            if section.dtype == "auto":
                section = section.model_copy()
                section.__dict__["dtype"] = "bfloat16" if self._on_devices(role) else "float32"
                section.model_fields_set.discard("dtype")
                self.__dict__[name] = section

    def _on_devices(self, role: str) -> bool:
        """Whether that role computes on accelerators; a job by itself does not say where it runs."""
        return False

    def refused(self) -> Iterator[str]:
        yield from self._media_suit_the_engine()
        yield from self._sections_agree()
        if self.deterministic:
            yield from self._something_depends_on_time()

    def _media_suit_the_engine(self) -> Iterator[str]:
        sglang = self.rollout.sglang
        if sglang is None:
            return
        if self.media is not None and sglang.urls:
            yield (
                "media must be None with rollout.sglang.urls, whose servers are sent text alone, got settings of media. Remove "
                "them, or set rollout.sglang.python, so that servers are started which take media"
            )
        if self.media is not None and self.media.whole_positions is False:
            yield (
                "media.whole_positions must not be False with rollout.sglang, whose servers cut positions of videos to whole "
                "numbers, got False. Remove it"
            )
        names = ("enable-return-routed-experts", "enable_return_routed_experts")
        if self.train.router_replay and False in map(sglang.arguments.get, names):
            yield (
                "rollout.sglang.arguments must not turn enable-return-routed-experts off with train.router_replay, which needs "
                "what it tells, got False. Remove it: rondo sets it itself"
            )

    @property
    def num_updates(self) -> int:
        """Optimizer steps that make one policy version of the one before."""
        return self.train.optimizer_steps_per_batch * self.train.epochs

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt and the longest response to it, an evaluation's included."""
        sets = self.evaluation.named_sets().values() if self.evaluation is not None else ()
        longest = max(self.rollout.max_new_tokens, *(each.max_new_tokens or 0 for each in sets), 0)
        return self.rollout.max_prompt_tokens + longest

    @property
    def on_policy(self) -> bool:
        """Whether every row is first trained on under the version that it was sampled from."""
        return self.max_staleness == 0 and self.train.optimizer_steps_per_batch == 1

    @property
    def computes_alike(self) -> bool:
        """Whether engine and trainer give a token the same log-prob, to a millionth: both compute in float32, with torch. In
        bfloat16 two ways to compute one product differ by thousandths of a nat, on one device too."""
        return self.rollout.sglang is None and self.model.dtype == self.train.dtype == "float32"

    def loss(self) -> AlgorithmConfig:
        """The algorithm as the loss takes it: with the correction that engine and trainer of this job need."""
        return self.algorithm.for_numerics(alike=self.computes_alike)

    def old_log_probs(self, *, has_actor_fwd: bool) -> OldLogProbs:
        """Where pi_old comes from (`old_log_probs_source`)."""
        return old_log_probs_source(
            self.algorithm, on_policy=self.on_policy, has_actor_fwd=has_actor_fwd, alike=self.computes_alike
        )

    @property
    def can_lend_weights(self) -> bool:
        """Whether an embedded engine in the trainer's own process may generate with the trainer's tensors: they have one dtype,
        and move only when the step has all its samples."""
        embedded, same = self.rollout.sglang is None, self.model.dtype == "float32"
        return embedded and same and self.train.optimizer_steps_per_batch == 1

    def trainer_rests(self, *, on_device: bool) -> bool:
        """Whether a trainer that generates in turn with its training, in one process, gives its memory meanwhile."""
        chosen = self.train.release_memory
        return on_device and self.rollout.endpoint is None if chosen is None else chosen

    def demonstrated(self) -> DataConfig:
        """How the prompts of the warm-up's demonstrations are written."""
        assert self.sft is not None
        return self.sft.source(self.data)

    def prompt_limit(self) -> int | None:
        """Most tokens of a demonstration's prompt: as many as in reinforcement where it is one of the run's; None for what its
        answer leaves."""
        assert self.sft is not None
        return self.rollout.max_prompt_tokens if self.sft.demonstrate is not None else None

    def named_data(self) -> dict[str, DataConfig]:
        """Every data set that the settings describe, by the path of its section."""
        evaluation = self.evaluation
        found: dict[str, DataConfig | None] = {"data": self.data}
        for name, each in evaluation.named_sets().items() if evaluation is not None else ():
            found["evaluation.data" if each is evaluation else f"evaluation.sets.{name}.data"] = each.data
        found["sft.data"] = self.sft.data if self.sft is not None else None
        return {name: data for name, data in found.items() if data is not None}

    @property
    def num_pinned(self) -> int:
        """Slots of the weight slab for versions that are being evaluated."""
        return int(self.evaluation is not None and self.evaluation.every is not None)

    @property
    def num_weight_slots(self) -> int:
        """Slots of the weight slab."""
        return self.bus.weight_slots + self.num_pinned

    def _sections_agree(self) -> Iterator[str]:
        algorithm, rollout, train = self.algorithm, self.rollout, self.train
        if rollout.samples_per_prompt < algorithm.min_group_size:
            yield (
                f"rollout.samples_per_prompt must be at least {algorithm.min_group_size} with algorithm.name "
                f"{algorithm.name!r}, which compares the samples of a prompt, got {rollout.samples_per_prompt}. "
                "Raise it"
            )
        if algorithm.needs_dynamic_sampling and rollout.filter != "zero_std":
            yield (
                f"rollout.filter must be 'zero_std' with algorithm.name {algorithm.name!r}, which replaces prompt "
                f"groups of equal rewards, got {rollout.filter!r}. Set it, or set algorithm.name to 'grpo'"
            )
        if train.optimizer_steps_per_batch > rollout.prompts_per_step:
            yield (
                "train.optimizer_steps_per_batch must be at most rollout.prompts_per_step, since each trains on prompt groups "
                f"of its own, got {train.optimizer_steps_per_batch} and {rollout.prompts_per_step}. Lower it"
            )
        if self.num_updates > 1 and not train.hot_snapshot:
            yield (
                "train.hot_snapshot must be True with several optimizer steps a step (train.optimizer_steps_per_batch x "
                f"train.epochs = {self.num_updates}), since a step that is stopped between them is undone from it, got False. "
                "Remove it, or make one optimizer step"
            )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if train.micro_batch_tokens < longest:
            yield (
                "train.micro_batch_tokens must hold the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}, got {train.micro_batch_tokens}. Raise it to {longest}"
            )
        if train.warmup_steps >= self.num_steps:
            yield (
                "train.warmup_steps must be less than num_steps, "
                f"got {train.warmup_steps} and {self.num_steps}. Lower it"
            )
        evaluation = self.evaluation
        for name, each in evaluation.named_sets().items() if evaluation is not None else ():
            if each.data is None and self.data.held_out < each.num_prompts:
                section = f"evaluation.sets.{name}" if evaluation is not None and evaluation.sets else "evaluation"
                yield (
                    f"data.held_out must be at least {section}.num_prompts without {section}.data, "
                    f"got {self.data.held_out} and {each.num_prompts}. "
                    f"Set data.held_out to {each.num_prompts}, or name a data set in {section}.data"
                )
        if evaluation is not None and evaluation.every is not None and evaluation.every > self.num_steps:
            yield f"evaluation.every must be at most num_steps, got {evaluation.every} and {self.num_steps}. Lower it"
        if train.best is not None and "@" in train.best.metric:
            yield from self._best_has_no_value(train.best.metric)

    def _best_has_no_value(self, metric: str) -> Iterator[str]:
        sets = self.evaluation.named_sets() if self.evaluation is not None else {}
        known = [
            figure if len(sets) == 1 else f"{name}.{figure}" for name, each in sets.items() for figure in each.figures
        ]
        if metric not in known:
            yield (
                f"train.best.metric must be a figure of the evaluations, {', '.join(known) or 'of which there are none'}, got "
                f"{metric!r}. Name one of them, or a metric of every step"
            )
            return
        assert self.evaluation is not None
        saves, evaluates = self.train.save_every, self.evaluation.every
        together = None if saves is None or evaluates is None else math.lcm(saves, evaluates)
        if together is None or together >= self.num_steps:
            yield (
                f"train.best must find checkpoints that are evaluated, got train.save_every {saves} and evaluation.every "
                f"{evaluates}, which meet in none of {self.num_steps} steps. Set evaluation.every to train.save_every"
            )

    def _something_depends_on_time(self) -> Iterator[str]:
        rollout = self.rollout
        if rollout.sglang is not None:
            yield (
                "deterministic must be False with rollout.sglang, whose batches depend on time, got True. "
                "Remove rollout.sglang, or set deterministic=False"
            )
        if rollout.num_slots < MIN_FIXED_SLOTS:
            yield (
                f"rollout.num_slots must be at least {MIN_FIXED_SLOTS} with deterministic=True, since fewer rows are multiplied "
                f"in another order, got {rollout.num_slots}. Raise it"
            )
        if rollout.spare_groups:
            yield (
                "rollout.spare_groups must be 0 with deterministic=True, where no prompt group may win by being quick, "
                f"got {rollout.spare_groups}. Remove it, or set deterministic=False"
            )
        if rollout.straggler_deadline_s is not None:
            yield (
                "rollout.straggler_deadline_s must be None with deterministic=True, where no prompt group may fail by being "
                f"slow, got {rollout.straggler_deadline_s:g}. Remove it, or set deterministic=False"
            )

    @classmethod
    def from_resolved(cls, resolved: Mapping[str, Any]) -> JobConfig:
        """The job's part of a run's resolved settings (`config.resolved.json`), which hold placement and more."""
        return cls.model_validate({name: resolved[name] for name in cls.model_fields if name in resolved})
