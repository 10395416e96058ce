"""Settings of what the roles do: data, rewards, algorithm, rollout, training, warm-up, evaluation; together a job.

Owns the fields and what follows from them; which of them contradict each other is `agreement.py`'s, jobs without rollouts are
`supervised.py`'s. Does not own where roles run (`launch/config.py`) or the shape of the model (`models/config.py`). Imports no
torch.

    JobConfig(name="gsm8k", num_steps=150, model=..., data=DataConfig(path="train.jsonl", prompt="question"),
              reward=RewardConfig(function="rewards.py:exact"), rollout=RolloutConfig(prompts_per_step=32, ...))

Invariant: settings that contradict each other, or that could have no effect, are refused with both names and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rondo.comm.bus.config import BusConfig
from rondo.models.config import LoraConfig, MeshConfig, ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.algorithms.algorithm import AlgorithmConfig, OldLogProbs, old_log_probs_source
from rondo.roles.algorithms.teachers import DistillationConfig, TeacherConfig
from rondo.roles.config.agreement import depends_on_time, media_suit_the_engine, sections_agree
from rondo.roles.config.aliases import ALIASES, REMARKS
from rondo.roles.config.data import (
    NO_REWARD,
    CurriculumConfig,
    DataConfig,
    EvalConfig,
    EvalSet,
    RewardConfig,
    SourceConfig,
)
from rondo.roles.config.evaluations import benchmark
from rondo.roles.config.genrm import SCORE, SCORER, GenrmConfig, JudgeConfig, ScorerConfig
from rondo.roles.config.presets import full_size
from rondo.roles.config.rollout import (
    MIN_FIXED_SLOTS,
    SINGLE_TURN,
    AgentConfig,
    EndpointConfig,
    EnvironmentConfig,
    ListenConfig,
    McpConfig,
    RolloutConfig,
    SGLangConfig,
)
from rondo.roles.config.samples import DebugConfig, ProfileConfig, SamplesConfig
from rondo.roles.config.supervised import (
    DpoConfig,
    PairsConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
    job_is_not_whole,
    without_rollouts,
)
from rondo.roles.config.training import (
    AfterSaveConfig,
    BestConfig,
    CriticConfig,
    OptimizerConfig,
    ReferenceConfig,
    TrainConfig,
)
from rondo.runtime.config import SandboxConfig, SupervisionConfig
from rondo.runtime.section import FREE, LENGTH, Section, fixed

__all__ = [
    "MIN_FIXED_SLOTS",
    "OF_RUN",
    "AfterSaveConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "BestConfig",
    "CriticConfig",
    "CurriculumConfig",
    "DataConfig",
    "DebugConfig",
    "DistillationConfig",
    "DpoConfig",
    "EndpointConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSet",
    "GenrmConfig",
    "JobConfig",
    "ListenConfig",
    "LoraConfig",
    "McpConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PairsConfig",
    "ProfileConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SGLangConfig",
    "SamplesConfig",
    "SandboxConfig",
    "ScorerConfig",
    "SftConfig",
    "SourceConfig",
    "SupervisedConfig",
    "TeacherConfig",
    "TrainConfig",
    "benchmark",
    "full_size",
]


OF_RUN = fixed("the run is known by it")


class JobConfig(Section):
    """Everything that a role needs to do its work, wherever it runs."""

    aliases, remarks = ALIASES, REMARKS
    name: Annotated[str, OF_RUN] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    """Names the run's directory."""
    job: Annotated[Literal["rl", "sft", "dpo", "reward_model"], OF_RUN] = "rl"
    """What is trained on: samples of the policy's own ("rl"), or rows alone, as the section of that name says. Then that section
    has the steps and the optimizer, the actor's processes do it, and `num_steps`, `data` and `rollout` may be left out."""
    seed: Annotated[int, fixed("the order of the data and every draw follow from it")] = Field(0, ge=0, lt=1 << 63)
    """Of everything that is drawn: the order of rows, samples, what is held out."""
    num_steps: Annotated[int, LENGTH] = Field(ge=0)
    """Policy versions that the run makes; each is trained on `rollout.prompts_per_step` prompt groups. Of a job without rollouts
    those of its section; by its epochs 0, until the rows are counted."""
    max_staleness: Annotated[int, fixed("the prompt groups in its checkpoint were admitted under it")] = Field(1, ge=0)
    """In policy versions: how much older than the trained version a sample's oldest token may be. 0 is on-policy."""
    deterministic: bool = False
    """Equal settings train equal samples in equal rounds: at max_staleness 0 to the same bits, in every mode and through
    every death; above it the same prompts in the same order. Costs speed: shapes are fixed, and each process has one thread."""
    model: ModelConfig
    data: DataConfig
    media: MediaConfig | None = None
    """Limits of image, audio and video. None: the rows are text; where `media_columns` are named, the defaults."""
    evaluation: Annotated[EvalConfig | None, FREE] = None
    reward: RewardConfig = RewardConfig(function=NO_REWARD)
    """May be left out with `genrm` or `scorer`, which then judge alone, and where `distillation.task_coef` is 0."""
    genrm: GenrmConfig | None = None
    """A model that judges, whose verdicts are part of the reward."""
    scorer: ScorerConfig | None = None
    """A reward model, whose numbers are part of the reward."""
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
    reward_model: RewardModelConfig | None = None
    """Of the job "reward_model" alone."""
    samples: Annotated[SamplesConfig, FREE] = SamplesConfig()
    """Which trained samples are kept in full."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where code runs that the policy wrote."""
    debug: DebugConfig = DebugConfig()
    """Half of a run by itself: training without rollouts, rollouts without training."""
    bus: Annotated[BusConfig, FREE] = BusConfig()
    supervision: Annotated[SupervisionConfig, FREE] = SupervisionConfig()

    @model_validator(mode="before")
    @classmethod
    def _without_rollouts(cls, given: Any) -> Any:
        whole = isinstance(given, dict) and given.keys() | {"data"} >= cls.model_fields.keys()
        return without_rollouts(given, whole=whole)

    def derive(self) -> None:
        if self.job != "rl":  # their models are nobody's: no sample is judged or taught
            self.__dict__.update(genrm=None, scorer=None, distillation=None)
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
            # What was filled in from the section stays "not set", so that `override` derives it anew.
            filled = {"num_steps": own.steps is not None or not self.num_steps, "data": self.data == own.data}
            self.model_fields_set.difference_update(name for name, was in filled.items() if was)
        for name, own_judge in self.judges.items():
            if own_judge.model is not None and own_judge.model.dtype == "auto":
                judge, model = own_judge.model_copy(), own_judge.model.model_copy()
                model.__dict__["dtype"] = "bfloat16" if self._on_devices(name) else "float32"
                model.model_fields_set.discard("dtype")
                judge.__dict__["model"] = model
                self.__dict__[name] = judge

    def _on_devices(self, role: str) -> bool:
        """Whether that role computes on accelerators; a job by itself does not say where it runs."""
        return False

    @property
    def own(self) -> SupervisedConfig | None:
        """The section of a job without rollouts; None where samples are trained on."""
        return None if self.job == "rl" else getattr(self, self.job)

    def refused(self) -> Iterator[str]:
        for name, data in self.named_data().items():
            if data.curriculum is not None and name != "data":
                yield f"{name}.curriculum must be None, since prompts of reinforcement alone are judged, got it. Remove it"
        if self.job != "rl":
            yield from job_is_not_whole(self)
            return
        if self.num_steps < 1:
            yield f"num_steps must be at least 1 with job 'rl', got {self.num_steps}. Raise it"
        for name in ("dpo", "reward_model"):
            if getattr(self, name) is not None:
                yield f"{name} must be None with job 'rl', got settings of it. Remove them, or set job to {name!r}"
        for name, data in self.named_data().items():
            for column in ("rejected", "margin"):
                if (given := getattr(data, column)) is not None:
                    yield f"{name}.{column} must be None with job 'rl', which has no pairs, got {given!r}. Remove it"
        if self.sft is not None and self.sft.evaluate_every is not None:
            yield (
                "sft.evaluate_every must be None with job 'rl', whose `evaluation` measures the policy, got "
                f"{self.sft.evaluate_every}. Remove it, or set job to 'sft'"
            )
        rollout = self.rollout
        environment = rollout.environment and rollout.environment.factory
        told = self.judges or rollout.agent or environment or rollout.workflow != SINGLE_TURN
        if "reward" not in self.model_fields_set and not told and self.learns_from_rewards:
            yield "reward must be set, got nothing. Set reward=RewardConfig(function=...), genrm or scorer"
        yield from media_suit_the_engine(self)
        yield from sections_agree(self)
        if self.deterministic:
            yield from depends_on_time(self)

    @property
    def judges(self) -> dict[str, JudgeConfig]:
        """The models whose word is part of a reward, by the names of their sections."""
        named: dict[str, JudgeConfig | None] = {"genrm": self.genrm, "scorer": self.scorer}
        return {name: judge for name, judge in named.items() if judge is not None}

    @property
    def judged_s(self) -> float:
        """What they may take, who are asked at the same time."""
        return max((judge.longest_s for judge in self.judges.values()), default=0.0)

    @property
    def teacher_follows(self) -> bool:
        """Whether a teacher takes the policy's versions."""
        named = self.distillation.named().values() if self.distillation is not None else ()
        return any(teacher.follows for teacher in named)

    @property
    def needs_initial(self) -> bool:
        """Whether a role has the weights of before the first step."""
        named = self.distillation.named().values() if self.distillation is not None else ()
        stays = self.algorithm.needs_reference and self.reference.refresh_every is None
        begins = self.critic is not None and self.critic.path is None
        return stays or begins or any(teacher.begins for teacher in named)

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
        return self.train.num_mini_batches * self.train.passes

    @property
    def critic_passes(self) -> int:
        """Passes of the critic over the prompt groups of a step."""
        own = self.critic.passes if self.critic is not None else None
        return self.train.passes if own is None else own

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
        return self.max_staleness == 0 and self.train.num_mini_batches == 1

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
        """Of rewards: those of the function, those of the judge, or its score as one, and the scorer's, with their weights."""
        found = dict(self.reward.components)
        if self.genrm is not None:
            judged = self.genrm.components or {SCORE: 1.0}
            found |= {name: self.genrm.weight * part for name, part in judged.items()}
        return found | ({} if self.scorer is None else {SCORER: self.scorer.weight})

    @property
    def num_parts(self) -> int:
        """Components of a reward that travel beside it, to be told of each step; kept samples have none."""
        return len(self.components) if self.debug.train_only is None or self.compares_parts else 0

    @property
    def compares_parts(self) -> bool:
        """Whether each component is compared by itself."""
        return self.algorithm.advantage == "decoupled"

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
        return embedded and train.lora is None and self.model.dtype == "float32" and train.num_mini_batches == 1

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
        found |= {f"data.sources.{name}": self.data.of(name) for name in self.data.sources}
        for name, each in evaluation.named_sets().items() if evaluation is not None else ():
            found["evaluation.data" if each is evaluation else f"evaluation.sets.{name}.data"] = each.data
        found["sft.data"] = self.sft.data if self.sft is not None else None
        if self.own is not None:
            return {f"{self.job}.data": self.own.source(self.data)}
        return {name: data for name, data in found.items() if data is not None}

    @property
    def num_pinned(self) -> int:
        """Slots of the weight slab for versions that are being evaluated."""
        return int(self.job == "rl" and self.evaluation is not None and self.evaluation.every is not None)

    @property
    def num_weight_slots(self) -> int:
        """Slots of the weight slab."""
        return self.bus.weight_slots + self.num_pinned

    @classmethod
    def from_resolved(cls, resolved: Mapping[str, Any]) -> JobConfig:
        """The job's part of a run's resolved settings (`config.resolved.json`), which hold placement and more."""
        return cls.model_validate({name: resolved[name] for name in cls.model_fields if name in resolved})
