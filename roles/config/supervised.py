"""Settings of what is learnt from rows with answers: the warm-up on demonstrations, and the jobs that have no rollouts.

Owns their sections, what such a job has no word of, and which of its settings contradict each other. Does not own the job as a
whole (`roles/config/__init__.py`), nor how a row becomes tokens (`roles/training/sft.py`, `roles/training/preference.py`).

    JobConfig(name="chat", job="sft", model=..., sft=SftConfig(data=DataConfig(path="rows.jsonl"), steps=100, batch_size=32))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rondo.roles.config.data import NO_REWARD, DataConfig
from rondo.roles.config.training import Betas, OptimizerConfig
from rondo.runtime.section import FREE, LENGTH, FunctionRef, Section

if TYPE_CHECKING:
    from rondo.roles.config import JobConfig

_OF_SAMPLES = (
    "max_staleness", "evaluation", "reward", "bus", "genrm", "scorer", "algorithm", "reference", "distillation", "critic", "sft",
    "dpo", "reward_model",
)  # fmt: skip
_OF_STEPS = (
    "num_mini_batches",
    "passes",
    "hot_snapshot",
    "release_memory",
    "router_replay",
    "max_log_prob_gap",
    "before_step",
    "after_step",
)


class SupervisedConfig(OptimizerConfig):
    """What is learnt from rows with answers, none of which is sampled: a job of its own (`job`), on the actor's processes."""

    rows: FunctionRef | None = None
    """A function that returns the rows: dicts with `prompt` and `answer`. Prompts are written like those of `data`."""
    data: DataConfig | None = None
    """Or a data set, whose `label` column is the answer; with label=None the last message of its prompts is."""
    steps: Annotated[int | None, LENGTH] = Field(None, ge=1)
    """Optimizer steps, however often they go through the rows."""
    epochs: Annotated[int | None, LENGTH] = Field(None, ge=1)
    """Or passes over the rows, each of which comes once in each; the last step has the rows that are left."""
    batch_size: int = Field(ge=1)
    """Rows of one optimizer step."""
    evaluate_every: Annotated[int | None, FREE] = Field(None, ge=1)
    """Measures the rows that `data.held_out` keeps back before the first step, after every so many and after the last; in a job
    of its own."""
    lr: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    min_lr_fraction: float = Field(0.1, ge=0, le=1)
    betas: Betas = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    micro_batch_tokens: int = Field(4096, ge=1)
    """Also the longest row, in tokens."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The fields of which one says where rows come from."""
        return ("rows", "data")

    @property
    def figures(self) -> tuple[str, ...]:
        """What is measured of the rows that are held out, "eval_" in front of each."""
        return ("loss",)

    def refused(self) -> Iterator[str]:
        at = self.place
        given = [name for name in self.sources if getattr(self, name) is not None]
        if len(given) != 1:
            *most, last = (f"{at}.{name}" for name in self.sources)
            yield (
                f"exactly one of {', '.join(most)} and {last} must be set, got {' and '.join(given) or 'none'}. Name one source "
                "of rows"
            )
        if (self.steps is None) == (self.epochs is None):
            yield (
                f"exactly one of {at}.steps and {at}.epochs must be set, got {'none' if self.steps is None else 'both'}. Say how "
                "many steps there are, or passes over the rows"
            )
        if self.data is not None:
            yield from self._data_refused(self.data)
        held_out = self.data.held_out if self.data is not None else 0
        if bool(held_out) != (self.evaluate_every is not None):
            yield (
                f"{at}.data.held_out and {at}.evaluate_every must be set together, since one keeps back what the other measures, "
                f"got {held_out} and {self.evaluate_every}. Set both, or remove one"
            )
        wants = "rejected" in self.columns
        if self.data is not None and (self.data.rejected is not None) != wants:
            rule = "name the column with the worse answer" if wants else "be None, for no pairs are learnt"
            yield f"{at}.data.rejected must {rule}, got {self.data.rejected!r}. {'Set' if wants else 'Remove'} it"
        if self.data is not None and self.data.margin is not None and at != "reward_model":
            yield f"{at}.data.margin must be None, for only a reward model has such, got {self.data.margin!r}. Remove it"
        if self.data is not None and self.data.label is None and not self.data.apply_chat_template:
            yield (
                f"{at}.data.label must name the answer, or be None where {at}.data.apply_chat_template is True and the last "
                "message of a prompt is its answer, got None without it. Set one of them"
            )

    def _data_refused(self, data: DataConfig) -> Iterator[str]:
        at = self.place
        if data.num_passes is not None:
            yield (
                f"{at}.data.num_passes must be None, since {at}.epochs says how often the rows are gone through, got "
                f"{data.num_passes}. Set {at}.epochs in the place of {at}.steps, or remove it"
            )
        weighed = any(each.weight is not None for each in data.sources.values())
        if self.epochs is not None and weighed:
            yield (
                f"{at}.epochs must be None with weights of {at}.data.sources, by which each has passes of its own, got "
                f"{self.epochs}. Set {at}.steps, or remove the weights"
            )
        if data.curriculum is not None:
            yield f"{at}.data.curriculum must be None, since nothing is sampled for its rows, got one. Remove it"
        for name, each in data.sources.items():
            for setting in ("reward", "teacher", "max_new_tokens", "top_p", "top_k"):
                if (given := getattr(each, setting)) is not None:
                    yield (
                        f"{at}.data.sources.{name}.{setting} must be None, since nothing is sampled for its rows, got {given!r}. "
                        "Remove it"
                    )

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps over so many rows to train on."""
        if self.steps is not None or self.epochs is None:
            return self.steps or 0
        return -(-num_rows * self.epochs // self.batch_size)

    @property
    def columns(self) -> dict[str, str]:
        """Of what `rows` returns."""
        return {"prompt": "prompt", "label": "answer"}

    def source(self, prompts: DataConfig) -> DataConfig:
        """The rows as a data set, with the answer as its label. `prompts` are the run's: `rows` are written as they are."""
        if self.data is not None:
            return self.data
        same = {name: getattr(prompts, name) for name in DataConfig.OF_PROMPTS}
        return DataConfig(rows=self.rows, max_bad_rows=prompts.max_bad_rows, **self.columns, **same)


class SftConfig(SupervisedConfig):
    """Supervised fine-tuning on demonstrations, before the first step of a run or as a job of its own."""

    place = "sft"
    demonstrate: FunctionRef | None = None
    """Or a function `(prompt, label, draw) -> answer` for training rows of the run, called anew each time a row comes;
    `draw` is a seeded random.Random."""
    turns: Literal["last", "all", "marked"] = "last"
    """Which messages of the assistant are learnt where the answer is the last message of a chat: that one, all, or all but those
    that have a `weight` of 0."""

    @property
    def sources(self) -> tuple[str, ...]:
        return ("rows", "data", "demonstrate")

    @property
    def figures(self) -> tuple[str, ...]:
        return ("loss", "token_accuracy")

    def refused(self) -> Iterator[str]:
        yield from super().refused()
        if self.demonstrate is not None and self.epochs is not None:
            yield (
                "sft.epochs must be None with sft.demonstrate, which answers as many rows as sft.steps take, got "
                f"{self.epochs}. Set sft.steps"
            )
        if self.turns != "last" and (self.data is None or self.data.label is not None):
            yield (
                f"sft.turns must be 'last' unless sft.data.label is None, since only a chat has several turns, got "
                f"{self.turns!r}. Remove it, or set sft.data.label to None"
            )

    def source(self, prompts: DataConfig) -> DataConfig:
        """As of any; the rows of `demonstrate` are the run's own."""
        return prompts if self.demonstrate is not None else super().source(prompts)


class PairsConfig(SupervisedConfig):
    """What is learnt from pairs of answers, the better one and the worse. `rows` are dicts with `prompt`, `chosen` and
    `rejected`; of `data`, `label` names the better (None: the last message of a prompt is it) and `rejected` the worse."""

    @property
    def columns(self) -> dict[str, str]:
        return {"prompt": "prompt", "label": "chosen", "rejected": "rejected"}

    @property
    def figures(self) -> tuple[str, ...]:
        return ("loss", "rewards/accuracies", "rewards/margins")


class DpoConfig(PairsConfig):
    """Direct preference optimisation, a job of its own."""

    place = "dpo"
    lr: float = Field(1e-6, gt=0)
    loss: Literal["sigmoid", "hinge", "ipo", "orpo"] = "sigmoid"
    """Of the distance between the answers of a pair: DPO's own, SLiC's hinge, IPO's square, or ORPO's ratio of their odds beside
    the loss of the better one, with reference=False."""
    beta: float = Field(0.1, gt=0)
    """How much a log-ratio is worth: the larger, the nearer the policy stays to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """How probable it is that a pair is the wrong way round; of the loss "sigmoid"."""
    reference: bool = True
    """Log-probs count beside those of the weights that the job begins with; False: by themselves."""
    length_normalized: bool = False
    """Log-probs of an answer are means over its tokens, and no sums; with the loss "ipo" they always are."""
    margin: float = Field(0.0, ge=0)
    """By how much beta times the gap is to be above 0; SimPO's gamma, beside reference=False and length_normalized=True."""

    def refused(self) -> Iterator[str]:
        yield from super().refused()
        if self.loss == "orpo" and self.reference:
            yield "dpo.reference must be False with dpo.loss 'orpo', which has none, got True. Set it to False"
        for name in (
            ("label_smoothing",)
            if self.loss == "hinge"
            else ("label_smoothing", "margin")
            if self.loss in ("ipo", "orpo")
            else ()
        ):
            if getattr(self, name):
                yield f"dpo.{name} must be 0 with dpo.loss {self.loss!r}, which has none, got {getattr(self, name)}. Remove it"


class RewardModelConfig(PairsConfig):
    """A reward model, which gives a whole answer one number, from pairs (Bradley and Terry 1952); a job of its own."""

    place = "reward_model"
    margin: float = Field(0.0, ge=0)
    """By how much the reward of the better answer is to be above that of the worse, and what `data.margin` says of the row."""
    center_rewards_coef: float = Field(0.0, ge=0)
    """Of the square of the sum of a pair's rewards, whose scale only has a middle by that; TRL's `center_rewards_coefficient`."""


_MEASURED_TOKENS, _MEASURED_SLOTS = 1024, 16
"""The longest prompt that is answered to measure a job without rollouts, and answers at once, where `rollout` does not say: the
engine's cache holds as many of the longest from its start."""


def without_rollouts(given: Any, *, whole: bool = False) -> Any:
    """What a job without rollouts has no word of. Its steps are its section's; by epochs 0, until the rows are counted. whole: of
    a run, in whose settings they are."""
    if not isinstance(given, dict) or given.get("job") not in ("sft", "dpo", "reward_model"):
        return given
    if (own := given.get(job := given["job"])) is None:  # before others are missed that it would have filled
        raise ValueError(f"{job} must be set with job {job!r}, got nothing. Add {job}=...")
    if isinstance(own, Section):
        own = own.model_dump(exclude_unset=True)
    if not isinstance(own, dict):
        return {"num_steps": 0, **given}
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
    if given.get("evaluation") is not None and own.get("demonstrate") is None:
        filled["rollout"] |= {"max_prompt_tokens": min(longest, _MEASURED_TOKENS), "num_slots": _MEASURED_SLOTS}
    if isinstance(rollout := given.get("rollout"), dict):
        given = given | {"rollout": filled["rollout"] | rollout}
    steps, told = own.get("steps"), given.get("num_steps")
    if told and not whole and told != steps:
        way = "steps" if own.get("epochs") is None else "epochs"
        raise ValueError(
            f"num_steps must be None with job {job!r}, whose {job}.{way} says how long it is, got {told!r}. Remove it, or change "
            f"{job}.{way}"
        )
    return {**filled, **given, "num_steps": steps or (told if whole else 0) or 0}


def job_is_not_whole(job: JobConfig) -> Iterator[str]:
    assert job.own is not None
    balances = () if job.job == "sft" else ("router_aux_loss_coef",)
    for name in (*balances, "router_bias_update_rate"):
        if value := getattr(job.train, name):
            yield f"train.{name} must be 0 with job {job.job!r}, which evens out no experts so, got {value:g}. Remove it"
    best, known = job.train.best, ("loss", *(f"eval_{name}" for name in job.own.figures))
    if best is not None and best.metric not in known:
        yield f"train.best.metric must be one of {', '.join(known)} with job {job.job!r}, got {best.metric!r}. Change it"
    if best is not None and best.metric != "loss" and (job.train.save_every or 1) % (job.own.evaluate_every or 1 << 62):
        yield (
            f"train.save_every must be a multiple of {job.job}.evaluate_every with train.best, so that checkpoints are "
            f"measured, got {job.train.save_every} and {job.own.evaluate_every}. Change one of them"
        )


def answers_are_not_measured(job: JobConfig) -> Iterator[str]:
    """Where a role of the job is to sample and score answers to `evaluation`."""
    assert job.own is not None and job.evaluation is not None
    evaluation, held_out = job.evaluation, job.own.data.held_out if job.own.data is not None else 0
    if job.rollout.sglang is not None:
        yield (
            f"rollout.sglang must be None with job {job.job!r}, whose versions the embedded engine measures, got settings of it. "
            "Remove them"
        )
    for name, each in evaluation.named_sets().items():
        at = f"evaluation.sets.{name}" if evaluation.sets else "evaluation"
        if each.data is None and not held_out:
            yield (
                f"{job.job}.data.held_out must be at least 1 without {at}.data, got 0. Set {job.job}.data.held_out to "
                f"{each.num_prompts}, or name a data set in {at}.data"
            )
        if each.reward is None and job.reward.function == NO_REWARD:
            yield f"reward must be set with {at}, whose answers it scores, got nothing. Set reward, or {at}.reward"
        if each.max_new_tokens is None and job.rollout.max_new_tokens == 1:
            yield (
                f"{at}.max_new_tokens must be set with job {job.job!r}, which has no rollouts that say how long answers may be, "
                "got nothing. Set it"
            )
    for setting, given in evaluation.changed("share", "num_slots").items():
        yield (
            f"evaluation.{setting} must be left out with job {job.job!r}, where nothing else is generated, got {given}. "
            "Remove it; rollout.num_slots says how many answers are sampled at once"
        )


def unread(job: JobConfig, *, measures: bool = False) -> list[str]:
    """The settings that a job without rollouts has, and does not go by: those of a run of the same settings with job "rl".
    measures: the answers of its versions are sampled and scored."""
    assert job.own is not None
    own, found = job.own, list[str]()
    if own.data is not None and job.data != own.data:  # without it that says how prompts of the rows are written
        found.append("data")
    filled = without_rollouts({"job": job.job, job.job: own, "evaluation": job.evaluation})["rollout"]
    answered = getattr(own, "demonstrate", None) is not None
    found += ["data.num_passes"] if answered and job.data.num_passes is not None else []
    if not (answered or measures) and job.rollout != type(job.rollout).model_validate(filled):
        found.append("rollout")
    if (
        job.model_fields_set | {"num_steps", "data"} >= type(job).model_fields.keys()
    ):  # which were given is not known of a run
        return found
    others = (
        name for name in _OF_SAMPLES if name not in (job.job, *(("evaluation", "reward") if measures else ()))
        and name in job.model_fields_set
        and (getattr(job, name) is not None or name in ("genrm", "scorer", "distillation"))  # which it has let go
    )  # fmt: skip
    trained = (
        f"train.{name}" for name in (*OptimizerConfig.model_fields, *_OF_STEPS) if name in job.train.model_fields_set
    )
    return [*found, *others, *trained]
