"""Algorithms: one frozen, declarative record each, and the section of the settings at the same time.

Owns the table of names, what a name stands for, which options contradict it, and what the ratio of a job compares with
(`old_log_probs_source`). Does not own formulas: a record names its functions, of `advantages.py` and `losses.py` or of the
user's, which every process looks up for itself (`function_of`). Imports no torch.

    AlgorithmConfig(name="dapo", kl_coef=0.02)
        -> advantage="group_mean_std", loss_aggregation="token", clip_low=0.2, clip_high=0.28, kl_coef=0.02, ...

Invariant: an option that is not set, or None (but for `normalize_batch`, where None is a choice), is what the algorithm of that
name stands for; an option that contradicts what makes the algorithm what it is (`FIXED`) is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from rondo.runtime.reference import load_reference
from rondo.runtime.section import FunctionRef, Section, nearest

Advantage = Literal[
    "group_mean_std", "group_mean", "leave_one_out", "group_mean_ratio", "reward_to_go", "decoupled", "turns", "gae"
]
PolicyLoss = Literal["ppo_clip", "gspo", "gspo_token", "m2po", "sapo", "reinforce", "cispo_signed", "p3o"]
LossAggregation = Literal["sample", "token", "constant"]
KlEstimator = Literal["k1", "k2", "k3", "low_var", "unbiased"]
OldLogProbs = Literal["self", "actor_fwd", "rollout"]
KlIn = Literal["loss", "reward"]
TisMode = Literal["truncate", "mask", "reject"]
TisLevel = Literal["token", "sequence", "geometric"]
BatchNormalization = Literal["tokens", "samples"]


ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, equations 3 and 4.
    "grpo": {},
    # Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2: neither divided by the
    # standard deviation of the group nor by the length of the response.
    "dr_grpo": {"advantage": "group_mean", "loss_aggregation": "constant"},
    # Yu et al. 2025, DAPO, arXiv 2503.14476, equations 8 to 12: clip-higher, token-level loss, dynamic sampling.
    "dapo": {"loss_aggregation": "token", "clip_high": 0.28, "needs_dynamic_sampling": True},
    # Zheng et al. 2025, GSPO, arXiv 2507.18071: one ratio a sample, and so clips a thousand times narrower.
    "gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"policy_loss": "gspo_token", "clip_low": 3e-4, "clip_high": 4e-4},
    # Gao et al. 2025, SAPO, arXiv 2511.20347.
    "sapo": {"policy_loss": "sapo"},
    # MiniMax 2025, MiniMax-M1, arXiv 2506.13585; its bounds are those of ScaleRL (Khatri et al. 2025, arXiv 2510.13786).
    "cispo": {"policy_loss": "reinforce", "loss_aggregation": "token", "clip_low": 1.0, "clip_high": 4.0},
    "cispo_signed": {"policy_loss": "cispo_signed", "loss_aggregation": "token"},
    # Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740.
    "rloo": {
        "advantage": "leave_one_out", "policy_loss": "reinforce", "loss_aggregation": "token", "clip_low": 1.0, "clip_high": 1.0,
    },
    # Hu et al. 2025, REINFORCE++, arXiv 2501.03262: no baseline but the step's own mean; and its form with the group's.
    "reinforce_plus_plus": {
        "advantage": "reward_to_go", "loss_aggregation": "token", "normalize_batch": "tokens", "kl": "k1", "kl_in": "reward",
        "min_group_size": 1, "needs_full_step": True,
    },
    "reinforce_plus_plus_baseline": {
        "advantage": "group_mean", "loss_aggregation": "token", "normalize_batch": "tokens", "kl": "k2", "needs_full_step": True,
    },
    # Zheng et al. 2025, Prosperity before Collapse, arXiv 2510.01161.
    "m2po": {
        "policy_loss": "m2po", "loss_aggregation": "token", "clip_low": 0.3, "clip_high": 0.5, "old_log_probs": "rollout",
        "needs_full_step": True,
    },
    # Liu et al. 2026, GDPO, arXiv 2601.05242.
    "gdpo": {"advantage": "decoupled", "normalize_batch": "samples", "needs_full_step": True},
    # Fakoor et al. 2019, P3O, arXiv 1905.01756.
    "p3o": {"policy_loss": "p3o", "loss_aggregation": "token", "old_log_probs": "rollout", "needs_full_step": True},
    # Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning, arXiv 2602.02710.
    "maxrl": {
        "advantage": "group_mean_ratio", "policy_loss": "reinforce", "loss_aggregation": "token", "clip_low": 1.0,
        "clip_high": 1.0,
    },
    # Schulman et al. 2017, arXiv 1707.06347, with a critic's values and advantages over the step's tokens brought to mean 0 and
    # deviation 1, as PPO is run on language models (Ouyang et al. 2022, arXiv 2203.02155).
    "ppo": {
        "advantage": "gae", "loss_aggregation": "token", "normalize_batch": "tokens", "needs_full_step": True,
        "min_group_size": 1,
    },
}  # fmt: skip
"""Name -> where it differs from the defaults."""

FIXED: Mapping[str, tuple[str, ...]] = {
    "dr_grpo": ("advantage", "loss_aggregation"),
    "dapo": ("loss_aggregation",),
    "gspo": ("policy_loss", "loss_aggregation"),
    "gspo_token": ("policy_loss", "loss_aggregation"),
    "sapo": ("policy_loss",),
    "cispo": ("policy_loss",),
    "cispo_signed": ("policy_loss",),
    "rloo": ("advantage", "policy_loss"),
    "reinforce_plus_plus": ("advantage",),
    "reinforce_plus_plus_baseline": ("advantage",),
    "m2po": ("policy_loss", "old_log_probs"),
    "gdpo": ("advantage",),
    "p3o": ("policy_loss", "old_log_probs"),
    "maxrl": ("advantage",),
    "ppo": ("advantage",),
}
"""What no option may change."""
_CLIPS = ("clip_low", "clip_high", "dual_clip")
_TAUS = ("sapo_tau_positive", "sapo_tau_negative")
_TAKES: Mapping[str, tuple[str, ...]] = {
    "ppo_clip": _CLIPS, "gspo": _CLIPS, "gspo_token": _CLIPS, "m2po": (*_CLIPS, "m2_budget"), "sapo": _TAUS,
    "reinforce": _CLIPS[:2], "cispo_signed": _CLIPS, "p3o": (),
}  # fmt: skip
"""The options that a loss of ours reads, of those that are for losses alone."""
_OF_ITS_OWN = ("min_group_size", "needs_full_step", "needs_dynamic_sampling")

TIS_HIGH = 2.0
"""The bound of a correction that nobody has set (Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training)."""


class AlgorithmConfig(Section):
    """What one algorithm computes and needs. Coefficients are without unit; clips are distances of the ratio from 1."""

    name: str = "grpo"
    """The algorithm, which says what every option that is not set stands for (docs/algorithms.md)."""
    own: bool = False
    """The name is yours: the algorithm is what the fields say, and nothing stands behind its name."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped at 1 - clip_low; with 1 not at all on this side."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped at 1 + clip_high. Where both sides are alike by default it follows a `clip_low` that is set."""
    dual_clip: float = Field(3.0, gt=1)
    """No token of negative advantage weighs more than so many times it in a clipped loss (Ye et al. 2020, arXiv 1912.09729, their
    c). Without, one whose ratio is great, by a step or by numerics, has no bound; 1e9 bounds nothing."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """How soon SAPO's gate fades as the ratio leaves 1, for advantages above 0."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """The same for other advantages."""
    m2_budget: float = Field(0.01, gt=0)
    """The second moment of harmful log-ratios that M2PO allows, in nats squared."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model; 0 needs no reference."""
    kl: KlEstimator = "k3"
    """How the KL is estimated from log-probs (docs/algorithms.md)."""
    kl_in: KlIn = "loss"
    """Where that KL counts: a term of the loss, with its gradient, or taken off the reward of the sample that it is of."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the policy's entropy at each token, which the loss rewards."""
    normalize_std: bool | None = None
    """Whether advantages are divided by the standard deviation of their prompt group: another word for `advantage`."""
    loss_aggregation: LossAggregation = "sample"
    """What a step's summed loss is divided by: samples (of token means), tokens, or samples x max_new_tokens."""
    normalize_batch: BatchNormalization | None = None
    """Brings the advantages of a whole step to mean 0 and deviation 1, over its tokens or over its samples. None, where it is
    set, leaves them as they are."""
    advantage: Advantage | FunctionRef = "group_mean_std"
    """`def advantage(rewards, masks)`: from the rewards of a prompt group to numbers for its samples, or for their tokens."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Of advantage "gae" how much less each token further on counts, of "turns" each turn."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Of advantage "gae": 1 trusts what a sample got, 0 the critic's value of the next token alone."""
    bootstrap_truncated: bool = False
    """Of advantage "gae": whether a sample that its limit cut off is worth what the critic expects behind its last token; else it
    is over there, as any other."""
    policy_loss: PolicyLoss | FunctionRef = "ppo_clip"
    """`def loss(batch, algorithm)`: the loss of every token of some samples."""
    correction: FunctionRef | None = None
    """`def correction(batch, algorithm)`: what the loss of every token is weighted with, in the place of `tis_*`."""
    old_log_probs: Literal["auto", "self", "actor_fwd", "rollout"] = "auto"
    """pi_old of the ratio: `old_log_probs_source` has the rule for auto. With a name, that and nothing else: no
    correction but one that is set."""
    tis_low: float = Field(0.0, ge=0)
    """Least importance weight; see `tis_high`."""
    tis_high: float | None = Field(None, gt=0)
    """Importance correction, engine against trainer: the loss is weighted with w = pi_old / pi_rollout within these bounds. By
    default up to 2 where the two do not compute alike (SGLang, or bfloat16)."""
    tis_mode: TisMode = "truncate"
    """truncate: clamp(w, tis_low, tis_high). mask: w within the bounds, else 0. reject: beyond the bounds a token is none of the
    loss, nor of what this is divided by."""
    count_rejected: bool = False
    """Whether a sample whose tokens a correction all rejected still counts in a loss that is divided by samples. By default the
    loss is divided by the samples that are left, as with tokens."""
    tis_level: TisLevel = "token"
    """What w is: the ratio of a token, or of its whole sample: the product of its tokens' ratios, or their geometric mean."""
    opsm_delta: float | None = Field(None, ge=0)
    """Leaves tokens of negative advantage out of the policy loss where their sample has become by more than so many nats a token
    less likely than it was sampled (off-policy sequence masking); Relax's is 1e-4."""
    min_group_size: int = Field(2, ge=1)
    """Samples of a prompt that an advantage compares, at least. This and the next two are for an algorithm of your own."""
    needs_full_step: bool = False
    """Whether the first gradient needs every sample of the step (whitening and the like)."""
    needs_dynamic_sampling: bool = False
    """Whether prompt groups with equal rewards must be replaced by others (`rollout.filter='zero_std'`)."""

    @model_validator(mode="before")
    @classmethod
    def _none_is_not_set(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name == "normalize_batch"}

    def derive(self) -> None:
        stands_for = dict(ALGORITHMS.get(self.name, {}))
        if self.normalize_std is not None:
            stands_for["advantage"] = "group_mean_std" if self.normalize_std else "group_mean"
        if "clip_low" in self.model_fields_set and "clip_high" not in stands_for:
            stands_for["clip_high"] = self.clip_low
        if self.normalize_batch is not None:
            stands_for["needs_full_step"] = True
        self.__dict__.update({name: of for name, of in stands_for.items() if name not in self.model_fields_set})

    def refused(self) -> Iterator[str]:
        if self.own == (self.name in ALGORITHMS):
            rule = "be none of ours with algorithm.own" if self.own else "name an algorithm"
            hint = "Rename it" if self.own else nearest(self.name, list(ALGORITHMS))
            yield f"algorithm.name must {rule}, got {self.name!r}. {hint}"
        for option, got in self.changed("tis_low", "tis_mode", "tis_level").items() if self.tis_high is None else ():
            yield f"algorithm.tis_high must be set with algorithm.{option}, got only {option} {got}. Set both"
        if self.count_rejected and self.tis_mode != "reject" and self.correction is None:
            yield (
                "algorithm.count_rejected must be left out without a correction that rejects tokens, got True. Remove it, or set "
                "algorithm.tis_mode to 'reject'"
            )
        told = self.advantage != ("group_mean_std" if self.normalize_std else "group_mean")
        for option, other in (("tis_high", "correction"), ("normalize_std", "advantage")):
            if getattr(self, option) is not None and (told if other == "advantage" else self.correction is not None):
                yield (
                    f"algorithm.{option} must be left out with algorithm.{other}, which decides that, "
                    f"got {getattr(self, option)}. Remove one of them"
                )
        for option, got in self.changed("gamma", "gae_lambda", "bootstrap_truncated").items():
            if not (self.needs_critic or (option == "gamma" and self.by_turn)):
                yield (
                    f"algorithm.{option} must be left out without algorithm.advantage 'gae', which has no values, got "
                    f"{got}. Remove it, or set algorithm.name to 'ppo'"
                )
        if self.tis_high is not None and self.tis_high <= self.tis_low:
            yield (
                f"algorithm.tis_high must be greater than algorithm.tis_low, got {self.tis_high} and {self.tis_low}. "
                "Exchange them"
            )
        if self.tis_high is not None and self.old_log_probs == "rollout":
            yield (
                "algorithm.old_log_probs must not be 'rollout' with algorithm.tis_high, whose weights would all be 1, "
                "got both. Remove tis_high, or set old_log_probs to 'self' or 'actor_fwd'"
            )
        if self.kl_in == "reward" and self.kl == "unbiased":
            yield (
                "algorithm.kl must not be 'unbiased' with algorithm.kl_in 'reward', which takes the KL of the policy that "
                "sampled, where k1 and k3 are unbiased as they are, got both. Set algorithm.kl to 'k1'"
            )
        if self.kl_in == "reward" and self.kl_coef and self.advantage in ("decoupled", "group_mean_ratio", "turns"):
            why = {
                "decoupled": "which compares each component of a reward by itself",
                "turns": "which compares turns by themselves",
                "group_mean_ratio": "which takes rewards for chances of success, and so none below 0",
            }[self.advantage]
            yield (
                f"algorithm.kl_in must be 'loss' with algorithm.advantage {self.advantage!r}, {why}, got 'reward'. Change one of "
                "them"
            )
        yield from self._contradicted()

    def _contradicted(self) -> Iterator[str]:
        """What is set otherwise than the name stands for, or for another loss."""
        needed = {"needs_full_step": self.normalize_batch is not None, **ALGORITHMS.get(self.name, {})}
        for name in FIXED.get(self.name, ()) + (() if self.own else _OF_ITS_OWN):
            stands_for = needed.get(name, type(self).model_fields[name].default)
            if getattr(self, name) != stands_for:
                option = "normalize_std" if self.normalize_std is not None and name == "advantage" else name
                other = (
                    "set algorithm.own=True under another name"
                    if name in _OF_ITS_OWN
                    else "set algorithm.name to 'grpo'"
                )
                yield (
                    f"algorithm.{option} must be left out with algorithm.name {self.name!r}, which stands for "
                    f"{stands_for!r}, got {getattr(self, option)!r}. Remove it, or {other}"
                )
        for name, got in self.changed(*_CLIPS, *_TAUS, "m2_budget").items():
            if name not in _TAKES.get(self.policy_loss, (name,)):
                yield (
                    f"algorithm.{name} must be left out with algorithm.policy_loss {self.policy_loss!r}, which does not read it, "
                    f"got {got!r}. Remove it"
                )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def by_turn(self) -> bool:
        """Whether advantages are made of what each turn is worth."""
        return self.advantage == "turns"

    @property
    def joins_samples(self) -> bool:
        """Whether the loss looks at whole samples, or counts them, so that all rows of one belong into one micro-batch: any of
        them may be without a token that trains."""
        ours = ("ppo_clip", "m2po", "sapo", "reinforce", "cispo_signed", "p3o")
        by_token = self.loss_aggregation == "token" and self.normalize_batch != "samples" and self.policy_loss in ours
        return not by_token or self.tis_level != "token" or self.opsm_delta is not None or self.correction is not None

    @property
    def corrected_by(self) -> str | None:
        """The function that weighs the loss, if any does."""
        return "importance" if self.correction is None and self.tis_high is not None else self.correction

    @property
    def measures_drift(self) -> bool:
        """Whether the loss is made with what `drift.py` measures over the whole step."""
        return self.policy_loss in ("m2po", "p3o")

    def for_numerics(self, *, alike: bool) -> AlgorithmConfig:
        """As the loss takes it, for an engine and a trainer that compute alike or not. Where they do not, the difference is
        corrected up to `TIS_HIGH`, unless `old_log_probs` is chosen by name."""
        if alike or self.old_log_probs != "auto" or self.corrected_by is not None:
            return self
        return self.model_copy(update={"tis_high": TIS_HIGH})


def function_of(name: str, ours: Mapping[Any, Callable[..., Any]], setting: str) -> Callable[..., Any]:
    """The function that a record names: one of ours, or the user's. ConfigError, which names the setting, where there is none."""
    return ours[name] if name in ours else load_reference(name, setting)


def old_log_probs_source(
    config: AlgorithmConfig, *, on_policy: bool, has_actor_fwd: bool, alike: bool = True
) -> OldLogProbs:
    """Where pi_old of the ratio comes from.

    "self" is the trainer under the weights that the step begins with. For the rows of its first optimizer step that is the
    forward of their own loss, detached and kept for later passes: no other forward is needed. Rows that later optimizer steps
    begin with are scored before the first one moves the weights: after it their own forward would be compared with itself, and
    the clip would never act. Against the engine it is the proximal policy of decoupled PPO (Hilton et al. 2022, arXiv
    2110.00641), with the importance weight clip(pi_old / pi_engine, 0, tis_high) for what separates the two: numerics, and
    versions.

    "auto" takes it when every first use is under the version that a row was sampled from (`on_policy`), where pi_old and the
    sampling policy are one; else the recomputation of a role where there is one (`has_actor_fwd`). Without, "self" again where
    the engine does not compute as the trainer does (not `alike`) or a correction is asked for. Where both compute alike it is
    what the engine reported, which then is the sampling policy to the last bits: the clip bounds the distance to it, and nothing
    needs to be corrected or scored.

    A source that is asked for by name and missing is a ValueError.
    """
    if config.old_log_probs == "auto":
        if on_policy:
            return "self"
        if has_actor_fwd:
            return "actor_fwd"
        return "rollout" if alike and config.tis_high is None else "self"
    if config.old_log_probs == "actor_fwd" and not has_actor_fwd:
        raise ValueError(
            "algorithm.old_log_probs must name a role of the run, got 'actor_fwd' without an actor_fwd role. "
            "Add the role to `role_groups`, or set algorithm.old_log_probs to 'rollout' or 'auto'"
        )
    return config.old_log_probs
