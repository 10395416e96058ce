"""Algorithms: one frozen, declarative record each.

Owns the table, how options of the settings change a record, and what the ratio of a job compares with
(`old_log_probs_source`). Does not own formulas: an entry names its functions, of `advantages.py` and `losses.py` or of the
user's, which every process looks up for itself (`function_of`). Imports no torch.

    resolve(AlgorithmConfig(name="dapo", kl_coef=0.02))
        -> Algorithm(name="dapo", advantage="group_mean_std", normalizer="token", clip_high=0.28, kl_coef=0.02, ...)

Invariant: an option that is not set keeps the record's value; an option that contradicts what makes the algorithm what
it is (`fixed`) is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rondo.runtime.reference import load_reference

if TYPE_CHECKING:
    from rondo.roles.config import AlgorithmConfig

Advantage = Literal["group_mean_std", "group_mean"]
PolicyLoss = Literal["ppo_clip"]
Normalizer = Literal["sample", "token", "constant"]
KlEstimator = Literal["k1", "k2", "k3", "low_var"]
OldLogProbs = Literal["self", "actor_fwd", "rollout"]
TisMode = Literal["truncate", "mask"]
TisLevel = Literal["token", "sequence", "geometric"]
BatchNormalization = Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one algorithm computes and needs. Coefficients are without unit; clips are distances of the ratio from 1."""

    name: str
    advantage: Advantage | str = "group_mean_std"
    policy_loss: PolicyLoss | str = "ppo_clip"
    correction: str | None = None
    """What weighs the loss of tokens in the place of importance weights within `tis_*`. These three name functions: one of ours,
    or 'module:function' / 'file.py:function'."""
    normalizer: Normalizer = "sample"
    """What a step's summed loss is divided by: samples (of token means), tokens, or samples x max_new_tokens."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """No token of negative advantage weighs more than so many times it (Ye et al. 2020, arXiv 1912.09729, their c). Without, one
    whose ratio is great, by a step or by numerics, has no bound."""
    kl_coef: float = 0.0
    kl: KlEstimator = "k3"
    tis_low: float = 0.0
    tis_high: float | None = None
    """Importance correction from the engine to the trainer: the loss is weighted with w = pi_old / pi_rollout, within these
    bounds. None: no correction."""
    tis_mode: TisMode = "truncate"
    """truncate: clamp(w, tis_low, tis_high). mask: w within the bounds, else 0."""
    tis_level: TisLevel = "token"
    """What w is: the ratio of a token, or of its whole sample: the product of its tokens' ratios, or their geometric mean."""
    normalize_batch: BatchNormalization | None = None
    """Advantages of a step become (A - mean) / deviation, over its tokens or over its samples. None: they stay."""
    min_group_size: int = 2
    needs_full_step: bool = False
    """Whether the first gradient needs every sample of the step (whitening and the like)."""
    needs_dynamic_sampling: bool = False
    """Whether prompt groups with equal rewards must be replaced by others (`rollout.filter='zero_std'`)."""
    fixed: tuple[str, ...] = ()
    """Fields that no option may change."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def corrected_by(self) -> str | None:
        """The function that weighs the loss, if any does."""
        return "importance" if self.correction is None and self.tis_high is not None else self.correction


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        # Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, equations 3 and 4.
        Algorithm("grpo"),
        # Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2: neither divided by the
        # standard deviation of the group nor by the length of the response.
        Algorithm("dr_grpo", advantage="group_mean", normalizer="constant", fixed=("advantage", "normalizer")),
        # Yu et al. 2025, DAPO, arXiv 2503.14476, equations 8 to 12: clip-higher, token-level loss, dynamic sampling.
        Algorithm("dapo", normalizer="token", clip_high=0.28, needs_dynamic_sampling=True, fixed=("normalizer",)),
    )
}


TIS_HIGH = 2.0
"""The bound of a correction that nobody has set (Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training)."""

_OPTIONS = (
    "advantage", "policy_loss", "correction", "normalizer", "clip_low", "clip_high", "dual_clip", "kl_coef", "kl",
    "tis_low", "tis_high", "tis_mode", "tis_level", "normalize_batch",
)  # fmt: skip


def function_of(name: str, ours: Mapping[Any, Callable[..., Any]], setting: str) -> Callable[..., Any]:
    """The function that a record names: one of ours, or the user's. ConfigError, which names the setting, where there is none."""
    return ours[name] if name in ours else load_reference(name, setting)


def resolve(config: AlgorithmConfig, *, alike: bool = True) -> Algorithm:
    """The record that `config.name` names, with the options that are set, for an engine and a trainer that compute alike or not.

    ValueError for an option that contradicts the algorithm. A `clip_high` that is not set follows a `clip_low` that is,
    where the algorithm clips alike on both sides. Where the two do not compute alike, the difference is corrected up to
    `TIS_HIGH`, unless `old_log_probs` is chosen by name.
    """
    record = ALGORITHMS[config.name]
    given: dict[str, Any] = {name: value for name in _OPTIONS if (value := getattr(config, name)) is not None}
    if not alike and config.old_log_probs == "auto" and config.correction is None:
        given.setdefault("tis_high", TIS_HIGH)
    if config.normalize_batch is not None:
        given["needs_full_step"] = True
    if config.normalize_std is not None:
        given["advantage"] = "group_mean_std" if config.normalize_std else "group_mean"
    if "clip_low" in given and "clip_high" not in given and record.clip_low == record.clip_high:
        given["clip_high"] = given["clip_low"]
    for field in record.fixed:
        if field in given and given[field] != getattr(record, field):
            option = "normalize_std" if config.normalize_std is not None and field == "advantage" else field
            raise ValueError(
                f"algorithm.{option} must be left out with algorithm.name {config.name!r}, which stands for "
                f"{getattr(record, field)!r}, got {getattr(config, option)!r}. "
                "Remove it, or set algorithm.name to 'grpo'"
            )
    return replace(record, **given)


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
            "Add the role to `groups`, or set algorithm.old_log_probs to 'rollout' or 'auto'"
        )
    return config.old_log_probs
