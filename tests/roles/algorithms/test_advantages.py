"""Advantages against values worked out by hand, and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rondo.roles.algorithms.advantages import (
    ADVANTAGES,
    Scored,
    by_turn,
    decoupled,
    group_mean,
    group_mean_ratio,
    group_mean_std,
    leave_one_out,
    of_group,
    of_tokens,
)
from rondo.roles.algorithms.algorithm import ALGORITHMS, AlgorithmConfig
from rondo.roles.algorithms.whitening import Whitening, contribution
from rondo.runtime.errors import Fatal
from tests.roles.algorithms import by_hand

COMPARE = ("group_mean_std", "group_mean", "leave_one_out")
"""Those that compare the samples of a group, and a shift leaves alone."""
UNTAKEN = ("gdpo", "maxrl")
"""Of whose rewards no KL is taken off."""


def test_group_mean_std_by_hand() -> None:
    # mean 1/2; unbiased variance 4 x 1/4 / 3 = 1/3, deviation 0.577350; 0.5 / 0.577351 = 0.866024
    rewards = np.array([1, 0, 0, 1], np.float32)
    assert group_mean_std(rewards) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


def test_group_mean_by_hand() -> None:
    assert group_mean(np.array([3, 0, 0], np.float32)).tolist() == [2, -1, -1]


def test_the_deviation_is_torchs_unbiased_one() -> None:
    rewards = np.random.default_rng(0).normal(size=16).astype(np.float32)
    wanted = torch.from_numpy(rewards).double()
    wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
    np.testing.assert_allclose(group_mean_std(rewards), wanted.numpy(), rtol=1e-6)


def test_leave_one_out_by_hand() -> None:
    # Against the mean of the others: 3 - 1/2, 0 - 2, 1 - 3/2.
    assert leave_one_out(np.array([3, 0, 1], np.float32)).tolist() == pytest.approx([2.5, -2, -0.5])


def test_the_group_mean_ratio_by_hand() -> None:
    assert group_mean_ratio(np.array([1, 0, 0, 0], np.float32)).tolist() == pytest.approx([3, -1, -1, -1])
    assert not group_mean_ratio(np.zeros(3, np.float32)).any()
    with pytest.raises(
        Fatal, match=r"rewards must be 0 or more with algorithm.advantage 'group_mean_ratio'.*got -0\.5"
    ):
        group_mean_ratio(np.array([1, -0.5], np.float32))


def test_components_are_each_brought_to_one_scale_before_they_are_added() -> None:
    # A component of 100 and one of 0.01 count by their weights; one that is equal counts nothing.
    parts = np.array([[100, 0.00, 7], [0, 0.01, 7]], np.float32)
    assert decoupled(parts, weights=[1.0, 3.0, 9.0]).tolist() == pytest.approx([-(2**0.5), 2**0.5], rel=1e-3)
    samples = [Scored(9.0, np.ones(2, np.uint8), row) for row in parts]
    found = of_group(AlgorithmConfig(name="gdpo"), [1.0, 3.0, 9.0])(samples)
    assert [each.tolist() for each in found] == [pytest.approx([sign * 2**0.5] * 2, rel=1e-3) for sign in (-1, 1)]


def test_a_kl_in_the_reward_is_taken_off_whole_and_of_what_follows_a_token_without_a_baseline() -> None:
    # x = log pi - log pi_ref: 1, (masked: anything), 2 and 4 | 0, of rewards 1 and 3; times 0.5.
    masks = [np.array([1, 0, 1, 1], np.uint8), np.array([1], np.uint8)]
    sampled = [np.array([0, np.nan, 1, 2], np.float32), np.zeros(1, np.float32)]
    reference = [np.array([-1, np.inf, -1, -2], np.float32), np.zeros(1, np.float32)]
    samples = [Scored(*each) for each in zip([1.0, 3.0], masks, [None] * 2, sampled, reference, strict=True)]
    taken = {"kl_coef": 0.5, "kl_in": "reward", "kl": "k1"}
    # 1 - 0.5 x 7 = -2.5 against 3: mean 0.25.
    found = of_group(AlgorithmConfig(name="dr_grpo", **taken), [])(samples)
    assert [each.tolist() for each in found] == [[-2.75, 0, -2.75, -2.75], [2.75]]
    found = of_group(AlgorithmConfig(name="reinforce_plus_plus", kl_coef=0.5), [])(samples)
    assert [each.tolist() for each in found] == [[-2.5, 0, -2.0, -1.0], [3.0]]
    without = of_group(AlgorithmConfig(name="reinforce_plus_plus"), [])(samples)
    assert [each.tolist() for each in without] == [[1, 0, 1, 1], [3]]


@pytest.mark.parametrize(
    ("name", "kl_coef"),
    [(name, coef) for name in ALGORITHMS for coef in (0.0, 0.05) if name != "ppo" and not (coef and name in UNTAKEN)],
)
def test_what_the_tokens_of_a_step_get_is_what_the_papers_say(name: str, kl_coef: float) -> None:
    """From rewards on, whitening over the step included, beside a second implementation in float64 (PPO's is in
    `training/test_values.py`)."""
    kl: dict[str, Any] = {"kl_coef": kl_coef, "kl_in": "reward", "kl": "k1"} if kl_coef else {}
    draw, algorithm, groups = np.random.default_rng(4), AlgorithmConfig(name=name, **kl), []
    for size in (2, 4, 5):
        groups.append([])
        for length in draw.integers(2, 7, size):
            mask = (draw.random(length) < 0.7).astype(np.uint8)
            mask[0] = 1
            parts = draw.random(2).astype(np.float32)
            x, base = draw.normal(0, 0.3, length).astype(np.float32), draw.normal(-2, 0.3, length).astype(np.float32)
            groups[-1].append({"reward": 1 + draw.random(), "parts": parts, "mask": mask, "x": x, "base": base})
    found, masks = list[np.ndarray](), [each["mask"] for group in groups for each in group]
    for group in groups:
        scored = [Scored(e["reward"], e["mask"], e["parts"], e["base"] + e["x"], e["base"]) for e in group]
        found += of_group(algorithm, [1.0, 2.0])(scored)
    if (over := algorithm.normalize_batch) is not None:
        step = Whitening.of([contribution(*each, over) for each in zip(found, masks, strict=True)])
        found = [step.apply(*each) for each in zip(found, masks, strict=True)]
    wanted = by_hand.advantages(name, groups, kl_coef)
    for mine, theirs, mask in zip(found, wanted, masks, strict=True):
        np.testing.assert_allclose(mine, np.where(mask > 0, theirs, 0), atol=2e-5)


@pytest.mark.parametrize("name", [*COMPARE, "group_mean_ratio"])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_equal_rewards_give_no_advantage(name: str, size: int) -> None:
    advantages = ADVANTAGES[name](np.full(size, 0.1, np.float32))  # type: ignore[index]
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, np.zeros(size), atol=1e-8)


@pytest.mark.parametrize("name", COMPARE)
def test_advantages_of_a_group_sum_to_nothing_and_ignore_a_shift(name: str) -> None:
    rewards = np.random.default_rng(1).normal(size=8).astype(np.float32)
    compute = ADVANTAGES[name]  # type: ignore[index]
    assert compute(rewards).sum() == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(compute(rewards + 3), compute(rewards), atol=1e-5)


MASKS = [np.array(mask, np.uint8) for mask in ([1, 1, 0], [0, 1])]


def test_a_number_a_sample_and_numbers_a_token_reach_the_tokens_that_train() -> None:
    by_sample = of_tokens(lambda rewards, masks: rewards * 2, [1, 3], MASKS)
    assert [each.tolist() for each in by_sample] == [[2, 2, 0], [0, 6]]
    by_token = of_tokens(lambda rewards, masks: np.arange(1, 6), [1, 3], MASKS)
    assert [each.tolist() for each in by_token] == [[1, 2, 0], [0, 5]]
    assert {each.dtype.name for each in by_sample + by_token} == {"float32"}


@pytest.mark.parametrize("given", [np.zeros(3), np.zeros((2, 1)), np.array([np.nan, 0]), np.float32(0)])
def test_other_shapes_and_numbers_that_are_not_finite_end_the_run(given: np.ndarray) -> None:
    with pytest.raises(
        Fatal, match="must return one finite number for each of 2 samples, or for each of their 5 tokens"
    ):
        of_tokens(lambda rewards, masks: given, [1, 3], MASKS)


def test_turns_are_compared_by_themselves_and_a_token_gets_what_its_own_and_those_behind_are_worth() -> None:
    no = np.nan
    # Rewards 1, 0 and 2: mean 1, deviation 1. Sample 0 has two turns of two tokens, and two tokens that were said between them.
    turns = [np.array([no, 1, no, no, no, 0], np.float32), np.array([no, 2], np.float32)]
    masks = [np.array([1, 1, 0, 0, 1, 1], np.uint8), np.ones(2, np.uint8)]
    found = by_turn(turns, masks, gamma=0.5)
    assert found == pytest.approx([-0.5, -0.5, -1, -1, -1, -1, 1, 1], abs=1e-5)
    algorithm = AlgorithmConfig(advantage="turns", gamma=0.5)
    samples = [Scored(1.0, masks[0], turns=turns[0]), Scored(2.0, masks[1], turns=turns[1])]
    first, second = of_group(algorithm, [])(samples)
    assert first == pytest.approx([-0.5, -0.5, 0, 0, -1, -1], abs=1e-5) and second == pytest.approx([1, 1], abs=1e-5)


def test_samples_of_one_turn_have_the_advantages_of_grpo_when_turns_are_compared() -> None:
    rewards = np.array([1, 0, 0.5], np.float32)
    found = by_turn([np.array([np.nan, reward], np.float32) for reward in rewards])
    assert found[::2] == pytest.approx(group_mean_std(rewards)) and np.array_equal(found[::2], found[1::2])
