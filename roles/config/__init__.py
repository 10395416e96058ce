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
from typing import Any, Literal

from pydantic import Field, model_validator

from rondo.comm.bus.config import BusConfig
from rondo.models.config import LoraConfig, MeshConfig, ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.algorithms.algorithm import AlgorithmConfig, OldLogProbs, old_log_probs_source
from rondo.roles.algorithms.teachers import DistillationConfig, TeacherConfig
from rondo.roles.config.data import NO_REWARD, DataConfig, EvalConfig, EvalSet, RewardConfig
from rondo.roles.config.genrm import SCORE, GenrmConfig
from rondo.roles.config.presets import full_size
from rondo.roles.config.rollout import MIN_FIXED_SLOTS, EndpointConfig, RolloutConfig, SGLangConfig
from rondo.roles.config.training import (
    AfterSaveConfig,
    BestConfig,
    CriticConfig,
    DpoConfig,
    OptimizerConfig,
    PairsConfig,
    ReferenceConfig,
    SftConfig,
    SupervisedConfig,
    TrainConfig,
)
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.section import Section

__all__ = [
    "MIN_FIXED_SLOTS",
    "AfterSaveConfig",
    "AlgorithmConfig",
    "BestConfig",
    "CriticConfig",
    "DataConfig",
    "DistillationConfig",
    "DpoConfig",
    "EndpointConfig",
    "EvalConfig",
    "EvalSet",
    "GenrmConfig",
    "JobConfig",
    "LoraConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PairsConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "SGLangConfig",
    "SftConfig",
    "SupervisedConfig",
    "TeacherConfig",
    "TrainConfig",
    "full_size",
]


class JobConfig(Section):
    """Everything that a role needs to do its work, wherever it runs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """Names the run's directory."""
    job: Literal["rl", "sft", "dpo"] = "rl"
    """What is trained on: samples of the policy's own ("rl"), or rows alone, as the section of that name says. Then that section
    has the steps and the optimizer, the actor's processes do it, and `num_steps`, `data` and `rollout` may be left out."""
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
    reward: RewardConfig = RewardConfig(function=NO_REWARD)
    """May be left out with `genrm`, which then judges alone, and where `distillation.task_coef` is 0."""
    genrm: GenrmConfig | None = None
    """A model that judges, whose verdicts are part of the reward."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reference: ReferenceConfig = ReferenceConfig()
    distillation: DistillationConfig | None = None
    """Teachers, whose log-probs on the policy's samples train it beside the rewards, or instead of them."""
    rollout: RolloutConfig
    train: TrainConfig = TrainConfig()
    critic: CriticConfig | None = None
    """None: the defaults, where the algorithm has a critic."""
    sft: SftConfig | None = None
    dpo: DpoConfig | None = None
    """Of the job "dpo" alone."""
    bus: BusConfig = BusConfig()
    supervision: SupervisionConfig = SupervisionConfig()

    @model_validator(mode="before")
    @classmethod
    def _without_rollouts(cls, given: Any) -> Any:
        """What a job without rollouts has no word of; its steps are its section's, whatever a run of the same settings takes."""
        if not isinstance(given, dict) or given.get("job") not in ("sft", "dpo"):
            return given
        own = given.get(given["job"])
        if isinstance(own, Section):
            own = own.model_dump(exclude_unset=True)
        if not isinstance(own, dict):
            return given
        longest = own.get("micro_batch_tokens", SupervisedConfig.model_fields["micro_batch_tokens"].default)
        filled = {
            "data": own.get("data") or {"rows": own.get("rows")},
            "rollout": {
                "prompts_per_step": 1,
                "samples_per_prompt": 1,
                "max_prompt_tokens": longest,
                "max_new_tokens": 1,
            },
        }
        return {**filled, **given, "num_steps": own.get("steps", 1)}

    def derive(self) -> None:
        if self.job != "rl":  # their models are nobody's: no sample is judged or taught
            self.__dict__.update(genrm=None, distillation=None)
        # The field stays "not set", so that `override` derives it anew when the columns change.
        if self.media is None and any(data.media_columns for data in self.named_data().values()):
            self.__dict__["media"] = MediaConfig()
        if self.media is not None and self.media.whole_positions is None and self.rollout.sglang is not None:
            # Another object, in which the field stays "not set", so that `override` derives it anew.
            media = self.media.model_copy()
            media.__dict__["whole_positions"] = True
            self.__dict__["media"] = media

        if self.critic is not None or self.algorithm.needs_critic:
            critic = (self.critic or CriticConfig()).model_copy()
            if "micro_batch_tokens" not in critic.model_fields_set:
                critic.__dict__["micro_batch_tokens"] = self.train.micro_batch_tokens
            self.__dict__["critic"] = critic
        for name, role in (("model", "rollout"), ("train", "actor")):
            section = getattr(self, name)
            if section.dtype == "auto":
                section = section.model_copy()
                section.__dict__["dtype"] = "bfloat16" if self._on_devices(role) else "float32"
                section.model_fields_set.discard("dtype")
                self.__dict__[name] = section
        if (own := self.own) is not None:
            train = self.train.model_copy()
            # A job has nothing in memory that outlives its processes: it goes on from its checkpoints.
            train.__dict__.update(micro_batch_tokens=own.micro_batch_tokens, hot_snapshot=False)
            self.__dict__["train"] = train
        if self.genrm is not None and self.genrm.model is not None and self.genrm.model.dtype == "auto":
            judge, model = self.genrm.model_copy(), self.genrm.model.model_copy()
            model.__dict__["dtype"] = "bfloat16" if self._on_devices("genrm") else "float32"
            model.model_fields_set.discard("dtype")
            judge.__dict__["model"] = model
            self.__dict__["genrm"] = judge

    def _on_devices(self, role: str) -> bool:
        """Whether that role computes on accelerators; a job by itself does not say where it runs."""
        return False

    @property
    def own(self) -> SupervisedConfig | None:
        """The section of a job without rollouts; None where samples are trained on, or it is missing."""
        return None if self.job == "rl" else getattr(self, self.job)

    def refused(self) -> Iterator[str]:
        if self.job != "rl":
            yield from self._job_is_not_whole()
            return
        if self.dpo is not None:
            yield "dpo must be None with job 'rl', got settings of it. Remove them, or set job to 'dpo'"
        for name, data in self.named_data().items():
            if data.rejected is not None:
                yield f"{name}.rejected must be None with job 'rl', which has no pairs, got {data.rejected!r}. Remove it"
        if self.sft is not None and self.sft.evaluate_every is not None:
            yield (
                "sft.evaluate_every must be None with job 'rl', whose `evaluation` measures the policy, got "
                f"{self.sft.evaluate_every}. Remove it, or set job to 'sft'"
            )
        if "reward" not in self.model_fields_set and self.genrm is None and self.learns_from_rewards:
            yield "reward must be set, got nothing. Set reward=RewardConfig(function=...), or genrm"
        yield from self._media_suit_the_engine()
        yield from self._sections_agree()
        if self.deterministic:
            yield from self._something_depends_on_time()

    def _job_is_not_whole(self) -> Iterator[str]:
        if self.own is None:
            yield f"{self.job} must be set with job {self.job!r}, got nothing. Add {self.job}=..."
            return
        for name in ("router_aux_loss_coef", "router_bias_update_rate"):
            if value := getattr(self.train, name):
                yield (
                    f"train.{name} must be 0 with job {self.job!r}, which balances no experts, got {value:g}. Remove it"
                )
        best, known = self.train.best, ("loss", *(f"eval_{name}" for name in self.own.figures))
        if best is not None and best.metric not in known:
            yield f"train.best.metric must be one of {', '.join(known)} with job {self.job!r}, got {best.metric!r}. Change it"
        if (
            best is not None
            and best.metric != "loss"
            and (self.train.save_every or 1) % (self.own.evaluate_every or 1 << 62)
        ):
            yield (
                f"train.save_every must be a multiple of {self.job}.evaluate_every with train.best, so that checkpoints are "
                f"measured, got {self.train.save_every} and {self.own.evaluate_every}. Change one of them"
            )

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
        if self.train.router_replay == "r3" and False in map(sglang.arguments.get, names):
            yield (
                "rollout.sglang.arguments must not turn enable-return-routed-experts off with train.router_replay 'r3', which "
                "needs what it tells, got False. Remove it: rondo sets it itself"
            )

    @property
    def teacher_follows(self) -> bool:
        """Whether a teacher has the policy's newest weights."""
        named = self.distillation.named().values() if self.distillation is not None else ()
        return any(teacher.policy == "current" for teacher in named)

    @property
    def needs_initial(self) -> bool:
        """Whether a role has the weights of before the first step."""
        named = self.distillation.named().values() if self.distillation is not None else ()
        stays = self.algorithm.needs_reference and self.reference.refresh_every is None
        begins = self.critic is not None and self.critic.path is None
        return stays or begins or any(teacher.policy == "initial" for teacher in named)

    @property
    def learns_from_rewards(self) -> bool:
        """Whether they weigh anything; else a teacher alone is learnt from."""
        return self.distillation is None or self.distillation.task_coef > 0

    @property
    def joins_samples(self) -> bool:
        """Whether a sample may have several rows that are trained in one micro-batch."""
        return self.rollout.max_rows > 1 and self.algorithm.joins_samples

    @property
    def num_updates(self) -> int:
        """Optimizer steps that make one policy version of the one before."""
        return self.train.optimizer_steps_per_batch * self.train.epochs

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic over the prompt groups of a step."""
        own = self.critic.epochs if self.critic is not None else None
        return self.train.epochs if own is None else own

    def trains_policy(self, step: int) -> bool:
        """Whether a step trains the policy, or the critic alone."""
        return self.critic is None or step >= self.critic.only_steps

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
    def components(self) -> dict[str, float]:
        """Of rewards: those of the function and those of the judge, or its score as one, with their weights."""
        judged = {} if self.genrm is None else self.genrm.components or {SCORE: 1.0}
        weight = 1.0 if self.genrm is None else self.genrm.weight
        return dict(self.reward.components) | {name: weight * part for name, part in judged.items()}

    @property
    def num_parts(self) -> int:
        """Components of a reward that travel beside it, each to be compared by itself."""
        return len(self.components) if self.algorithm.advantage == "decoupled" else 0

    @property
    def measures_drift(self) -> bool:
        """Whether the loss needs to know of the whole step how far the policy is from the one that sampled: not where the two are
        one, to the last bits."""
        return self.algorithm.measures_drift and not (self.on_policy and self.computes_alike)

    @property
    def can_lend_weights(self) -> bool:
        """Whether an embedded engine in the trainer's own process may generate with the trainer's tensors: they have one dtype,
        and move only when the step has all its samples, or never, with adapters, of which the engine has its own."""
        embedded, train = self.rollout.sglang is None, self.train
        if self.adapts_engines:
            return embedded and self.model.dtype == train.dtype
        return (
            embedded and train.lora is None and self.model.dtype == "float32" and train.optimizer_steps_per_batch == 1
        )

    @property
    def computes_reference(self) -> bool:
        """Whether the reference is the base of the adapters, which the trainer has. A warm-up would have left it, and a KL in
        the reward is needed before the trainer sees a row."""
        in_loss = self.algorithm.needs_reference and self.algorithm.kl_in == "loss"
        return in_loss and self.train.lora is not None and self.sft is None

    @property
    def adapts_engines(self) -> bool:
        """Whether adapters alone are published."""
        return self.train.lora is not None and self.train.lora.publish == "adapter"

    @property
    def adapter_room(self) -> int:
        """Versions of an adapter that a server may be asked for at once: from that of samples which are as old as they may be to
        the newest, and one that comes. Those that are evaluated beside the training are the embedded engine's, also then."""
        return self.max_staleness + 2

    def trainer_rests(self, *, on_device: bool) -> bool:
        """Whether a trainer that generates in turn with its training, in one process, gives its memory meanwhile."""
        chosen = self.train.release_memory
        return on_device and self.rollout.endpoint is None if chosen is None else chosen

    @property
    def shown(self) -> SupervisedConfig | None:
        """Which section says what is learnt from rows: that of the job, or of the warm-up."""
        return self.sft if self.job == "rl" else self.own

    def demonstrated(self) -> DataConfig:
        """How the prompts of these rows are written."""
        assert self.shown is not None
        return self.shown.source(self.data)

    def prompt_limit(self) -> int | None:
        """Most tokens of a demonstration's prompt: as many as in reinforcement where it is one of the run's; None for what its
        answer leaves."""
        answered = isinstance(self.shown, SftConfig) and self.shown.demonstrate is not None
        return self.rollout.max_prompt_tokens if answered else None

    def named_data(self) -> dict[str, DataConfig]:
        """Every data set that the settings describe, by the path of its section."""
        evaluation = self.evaluation
        found: dict[str, DataConfig | None] = {"data": self.data}
        for name, each in evaluation.named_sets().items() if evaluation is not None else ():
            found["evaluation.data" if each is evaluation else f"evaluation.sets.{name}.data"] = each.data
        found["sft.data"] = self.sft.data if self.sft is not None else None
        if self.own is not None:
            return {f"{self.job}.data": self.own.source(self.data)}
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
        if rollout.samples_per_prompt < algorithm.min_group_size and self.learns_from_rewards:
            yield (
                f"rollout.samples_per_prompt must be at least {algorithm.min_group_size} with algorithm.name "
                f"{algorithm.name!r}, which compares the samples of a prompt, got {rollout.samples_per_prompt}. "
                "Raise it"
            )
        if self.genrm is not None and (both := sorted(self.reward.components.keys() & self.genrm.components.keys())):
            yield f"genrm.components must have other names than reward.components, got {both[0]!r} in both. Rename one"
        if self.genrm is not None and self.genrm.per == "pair" and rollout.samples_per_prompt < 2:
            yield "rollout.samples_per_prompt must be at least 2 with genrm.per 'pair', got 1. Raise it"
        if self.genrm is not None and not self.learns_from_rewards:
            yield "genrm must be left out where distillation.task_coef is 0, since rewards weigh nothing there, got it. Remove it"
        served = self.distillation is not None and any(each.urls for each in self.distillation.named().values())
        if served and self.rollout.temperature != 1:
            yield (
                "rollout.temperature must be 1 with a teacher behind urls, whose servers tell log-probs at 1 alone, got "
                f"{self.rollout.temperature}. Remove it, or let the teacher's role hold the model"
            )
        if served and self.media is not None:
            yield (
                "media must be None with a teacher behind urls, whose servers are sent tokens alone, got settings of media. "
                "Remove them, or let the teacher's role hold the model"
            )
        if self.distillation is not None and self.distillation.context is not None and self.media is not None:
            yield (
                "distillation.context must be left out with media, whose places in a prompt it cannot keep, got both. Remove one"
            )
        if self.distillation is not None and self.distillation.context is not None and self.rollout.max_rows > 1:
            yield (
                "distillation.context must be left out where samples have several rows, each with a prompt of its own, got "
                f"rollout.max_rows {self.rollout.max_rows}. Remove it, or set rollout.max_rows to 1"
            )
        if self.distillation is not None and self.distillation.teachers and self.data.metadata is None:
            yield (
                "data.metadata must name the column that says which of distillation.teachers a row has, got None. Set it"
            )
        if not self.learns_from_rewards and rollout.filter is not None:
            yield (
                "rollout.filter must be None where distillation.task_coef is 0, since rewards say nothing of what is learnt, got "
                f"{rollout.filter!r}. Remove it"
            )
        if algorithm.needs_dynamic_sampling and rollout.filter != "zero_std":
            yield (
                f"rollout.filter must be 'zero_std' with algorithm.name {algorithm.name!r}, which replaces prompt "
                f"groups of equal rewards, got {rollout.filter!r}. Set it, or set algorithm.name to 'grpo'"
            )
        if self.reference.refresh_every is not None and train.lora is not None:
            yield (
                "reference.refresh_every must be None with train.lora, whose reference is the base of the adapters, got "
                f"{self.reference.refresh_every}. Remove it"
            )
        if algorithm.measures_drift and self.num_updates > 1:
            yield (
                "train.optimizer_steps_per_batch and train.epochs must be 1 with algorithm.policy_loss "
                f"{algorithm.policy_loss!r}, whose bounds are those of the weights that a step begins with, and would let later "
                f"updates go anywhere, got {train.optimizer_steps_per_batch} and {train.epochs}. Set them to 1, or "
                "algorithm.name to 'grpo'"
            )
        if self.reference.refresh_every is not None and not algorithm.needs_reference:
            yield (
                "algorithm.kl_coef must be above 0 with reference.refresh_every, since no reference is there without a KL, got "
                f"{algorithm.kl_coef:g}. Set it, or remove reference.refresh_every"
            )
        alone = self.genrm is not None and self.reward.function == NO_REWARD
        if algorithm.advantage == "decoupled" and not self.reward.components and not alone:
            yield (
                "reward.components must name what algorithm.advantage 'decoupled' compares, the numbers in the dict that "
                "reward.function returns, with their weights, got none. Set them, or set algorithm.name to 'grpo'"
            )
        if algorithm.advantage == "decoupled" and self.reward.overlong_tokens is not None:
            yield (
                "reward.overlong_tokens must be None with algorithm.advantage 'decoupled', which compares components and no sum "
                f"of them, got {self.reward.overlong_tokens}. Remove it, and let reward.function return it as a component"
            )
        if (self.reward.overlong_tokens or 0) > rollout.max_new_tokens:
            yield (
                f"reward.overlong_tokens must be at most rollout.max_new_tokens, got {self.reward.overlong_tokens} and "
                f"{rollout.max_new_tokens}. Lower it"
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
        if train.lora is not None and train.lora.dropout and self.sft is None:
            yield (
                "train.lora.dropout must be 0 without sft: the log-probs of a policy are computed without noise, which would be "
                f"in every ratio of its loss, got {train.lora.dropout:g}. Remove it"
            )
        if self.adapts_engines and rollout.sglang is not None and rollout.sglang.router is not None:
            yield (
                "train.lora.publish must be 'merged' with rollout.sglang.router, behind which no server can be asked whether an "
                "adapter has arrived, got 'adapter'. Set it to 'merged', or remove the router"
            )
        for name, data in self.named_data().items():
            if data.balance is not None and name != "data":
                yield (
                    f"{name}.balance must be None, since steps of reinforcement alone are balanced, got {data.balance!r}. Remove "
                    "it"
                )
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if train.micro_batch_tokens < longest:
            yield (
                "train.micro_batch_tokens must hold the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}, got {train.micro_batch_tokens}. Raise it to {longest}"
            )
        if self.joins_samples and train.micro_batch_tokens < (joined := rollout.max_rows * longest):
            yield (
                f"train.micro_batch_tokens must hold all rows of a sample, rollout.max_rows x {longest} tokens = {joined}, with "
                f"an algorithm that looks at whole samples, got {train.micro_batch_tokens}. Raise it to {joined}, or set "
                "algorithm.normalizer to 'token'"
            )
        yield from self._critic_agrees()
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

    def _critic_agrees(self) -> Iterator[str]:
        critic = self.critic
        if critic is None:
            return
        if not self.algorithm.needs_critic:
            yield (
                f"critic must be left out with algorithm.name {self.algorithm.name!r}, which has none, got settings of it. "
                "Remove them, or set algorithm.name to 'ppo'"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        if critic.micro_batch_tokens < longest:
            yield (
                "critic.micro_batch_tokens must hold the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}, got {critic.micro_batch_tokens}. Raise it to {longest}"
            )
        for name in ("only_steps", "warmup_steps"):
            if getattr(critic, name) >= self.num_steps:
                yield (
                    f"critic.{name} must be less than num_steps, got {getattr(critic, name)} and {self.num_steps}. Lower it"
                )
        if self.distillation is not None and self.distillation.form == "advantage":
            yield (
                "distillation.form must not be 'advantage' with a critic, whose values know nothing of a teacher, got it. Set it "
                "to 'loss'"
            )
        if not self.train.hot_snapshot:
            yield (
                "train.hot_snapshot must be True with a critic, since what one of two roles alone has trained is undone from it, "
                "got False. Remove it"
            )

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
        if self.genrm is not None and (self.genrm.urls or self.genrm.sglang is not None):
            yield (
                "deterministic must be False with genrm.urls and genrm.sglang, whose batches depend on time, got True. Let the "
                "embedded engine judge, or set deterministic=False"
            )
        if self.reference.refresh_every is not None:
            yield (
                "reference.refresh_every must be None with deterministic=True, where no score may depend on when a version "
                f"comes, got {self.reference.refresh_every}. Remove it, or set deterministic=False"
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
