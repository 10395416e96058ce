"""Advantages: from the rewards of one prompt group to one number a sample, or one a token.

Owns the formulas by name, of which an algorithm's record names one or the user's own, the KL that is taken off rewards, and how
numbers reach tokens. numpy only: the role that runs them needs no torch.

    group_mean_std(np.array([1, 0, 0, 1], np.float32), masks) -> [0.866, -0.866, -0.866, 0.866]

Invariant: the result depends on this prompt group alone. That of those which compare samples sums to 0, and equal rewards give 0
for every sample; `reward_to_go` compares nothing, and leaves that to the whitening of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rondo.roles.algorithms.algorithm import Advantage, AlgorithmConfig, function_of
from rondo.roles.algorithms.divergence import kl_of_samples
from rondo.roles.algorithms.teachers import DistillationConfig
from rondo.runtime.errors import Fatal

AdvantageFunction = Callable[[np.ndarray, Sequence[np.ndarray]], np.ndarray]
"""(rewards float32 [n] of the samples of one prompt group that have one, masks: for each uint8 [R], 1 = its R tokens that train)
-> advantages float32 [n], or one a token: those of all samples behind each other, [sum of R]."""

EPSILON = 1e-6
"""Added to the standard deviation, so that equal rewards give 0 and not 0 / 0."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One sample that has a reward; R tokens of response."""

    reward: float
    mask: np.ndarray  # uint8 [R], 1 = trains
    parts: np.ndarray | None = None  # float32 [C]: the components of its reward, where they are compared by themselves
    log_probs: np.ndarray | None = None  # float32 [R], of the policy that sampled
    ref_log_probs: np.ndarray | None = None  # float32 [R]; both with the KL in the reward
    turns: np.ndarray | None = None  # float32 [R]: what each turn is worth at its last token, NaN elsewhere


def group_mean(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = r_i - mean(r): Dr.GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2)."""
    values = rewards.astype(np.float64)
    return (values - values.mean()).astype(np.float32)


def group_mean_std(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the unbiased standard deviation.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). A group of one sample has no deviation and gets 0.
    """
    values = rewards.astype(np.float64)
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return ((values - values.mean()) / (deviation + EPSILON)).astype(np.float32)


def leave_one_out(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = r_i - the mean of the others' rewards = n / (n - 1) (r_i - mean(r)): RLOO (Kool et al. 2019; Ahmadian et al. 2024,
    arXiv 2402.14740). A group of one sample has no others and gets 0."""
    return group_mean(rewards) * np.float32(len(rewards) / max(1, len(rewards) - 1))


def group_mean_ratio(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = (r_i - mean(r)) / mean(r), and 0 where no sample has a reward above 0: MaxRL (Tajwar et al. 2026, arXiv 2602.02710).

    The mean stands for the chance of success, whose logarithm is maximised; so Fatal for a reward below 0.
    """
    if (least := rewards.min(initial=0.0)) < 0:
        raise Fatal(
            "rewards must be 0 or more with algorithm.advantage 'group_mean_ratio', which takes their mean for a chance of "
            f"success, got {least:g}. Score from 0 to 1, or set algorithm.name to 'rloo'"
        )
    return group_mean(rewards) / np.float32(max(rewards.mean(dtype=np.float64), EPSILON))


def reward_to_go(rewards: np.ndarray, masks: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A_i = r_i; with a KL in the reward, of each token what follows it: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)."""
    return rewards


def decoupled(parts: np.ndarray, masks: Sequence[np.ndarray] = (), *, weights: Sequence[float]) -> np.ndarray:
    """float32 [n, C] -> [n]: each component of the rewards brought to mean 0 and deviation 1 in the group, then their weighted
    sum. GDPO (Liu et al. 2026, arXiv 2601.05242): one that is rare or small is not drowned by the others."""
    columns = [weight * group_mean_std(column) for weight, column in zip(weights, parts.T, strict=True)]
    return np.stack(columns).sum(axis=0, dtype=np.float32)


def by_turn(turns: Sequence[np.ndarray], masks: Sequence[np.ndarray] = (), *, gamma: float = 1.0) -> np.ndarray:
    """float32 [R] of each sample, the reward at the end of each turn and NaN elsewhere -> one number a token of all samples: the
    rewards of its turn and those behind it, each brought to mean 0 and deviation 1 over all turns of the group, and the k-th
    behind weighed with gamma ** k. GRPO with process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3); of samples
    of one turn it is GRPO's own."""
    ends = [np.flatnonzero(np.isfinite(each)) for each in turns]
    worth = np.concatenate([each[own] for each, own in zip(turns, ends, strict=True)])
    scaled = iter(np.split(group_mean_std(worth).astype(np.float64), np.cumsum([len(own) for own in ends])[:-1]))
    found = []
    for each, own in zip(turns, ends, strict=True):
        going, carried = np.zeros(len(own) + 1), 0.0  # behind the last turn there is nothing
        for at, reward in reversed(list(enumerate(next(scaled)))):
            carried = going[at] = reward + gamma * carried
        found.append(going[np.searchsorted(own, np.arange(len(each)))])
    return np.concatenate(found).astype(np.float32)


ADVANTAGES: Mapping[Advantage, Callable[..., np.ndarray]] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_mean_ratio": group_mean_ratio,
    "reward_to_go": reward_to_go,
    "decoupled": decoupled,
    "turns": by_turn,
}


def of_group(algorithm: AlgorithmConfig, weights: Sequence[float]) -> Callable[[Sequence[Scored]], list[np.ndarray]]:
    """What gives the samples of one prompt group their advantages, float32 [R] for each, 0 on tokens that do not train. weights:
    of the components of a reward. Fatal for what is not finite, and for another shape of the user's function."""
    compute = function_of(algorithm.advantage, ADVANTAGES, "algorithm.advantage")
    if algorithm.advantage == "decoupled":
        compute = partial(compute, weights=weights)
    if algorithm.by_turn:
        compute = partial(compute, gamma=algorithm.gamma)
    taken = algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0

    def advantages(samples: Sequence[Scored]) -> list[np.ndarray]:
        masks = [sample.mask for sample in samples]
        if algorithm.advantage == "decoupled":
            return of_tokens(compute, np.stack([sample.parts for sample in samples if sample.parts is not None]), masks)
        rewards = np.array([sample.reward for sample in samples], np.float64)
        if algorithm.by_turn:
            turns = [sample.turns for sample in samples if sample.turns is not None]
            return of_tokens(lambda _, masks: compute(turns, masks), rewards, masks)
        if not taken:
            return of_tokens(compute, rewards, masks)
        kls = [taken * kl_of(sample, algorithm) for sample in samples]
        found = of_tokens(compute, rewards - [each.sum() for each in kls], masks)
        if algorithm.advantage != "reward_to_go":
            return found
        # What a token could not change any more: the KL of those in front of it.
        return [
            np.where(mask > 0, values + np.cumsum(each) - each, 0.0).astype(np.float32)
            for values, each, mask in zip(found, kls, masks, strict=True)
        ]

    return advantages


def kl_of(sample: Scored, algorithm: AlgorithmConfig) -> np.ndarray:
    """float64 [R], 0 on tokens that do not train, which may hold anything."""
    assert sample.log_probs is not None and sample.ref_log_probs is not None
    kept = sample.mask > 0
    found = np.zeros(len(kept))
    found[kept] = kl_of_samples(sample.log_probs[kept], sample.ref_log_probs[kept], algorithm.kl)
    return found


def with_teacher(
    config: DistillationConfig, advantages: np.ndarray, mask: np.ndarray, log_probs: np.ndarray, teacher: np.ndarray
) -> np.ndarray:
    """task_coef A_t + coef (log pi_teacher - log pi) at each token that trains, float32 [R]; pi is what sampled it.

    A policy gradient with the second part alone descends the reverse KL, KL(pi || pi_teacher), of the next token (Lu and Thinking
    Machines Lab 2025, On-Policy Distillation; Gu et al. 2024, MiniLLM, arXiv 2306.08543, equation 5, without the later tokens).
    """
    floor = -np.inf if config.min_log_prob is None else config.min_log_prob
    found = config.task_coef * advantages + config.coef * (np.maximum(teacher, floor) - log_probs)
    return np.where(mask > 0, found, 0.0).astype(np.float32)


def of_tokens(
    compute: AdvantageFunction, rewards: Sequence[float] | np.ndarray, masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """What `compute` gives some samples of a group: float32 [R] for each, 0 on tokens that do not train. Fatal for another shape,
    and for what is not finite."""
    lengths = [len(mask) for mask in masks]
    found = np.asarray(compute(np.array(rewards, np.float32), masks), np.float32)
    if found.shape not in ((len(masks),), (sum(lengths),)) or not np.isfinite(found).all():
        got = f"shape {list(found.shape)}" if np.isfinite(found).all() else f"{found[~np.isfinite(found)].flat[0]}"
        raise Fatal(
            f"algorithm.advantage must return one finite number for each of {len(masks)} samples, or for each of their "
            f"{sum(lengths)} tokens, got {got}. Correct it"
        )
    parts = found if len(found) == len(masks) else np.split(found, np.cumsum(lengths)[:-1])
    return [mask.astype(np.float32) * part for mask, part in zip(masks, parts, strict=True)]
