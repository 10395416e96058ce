"""Advantages against values worked out by hand, and against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rondo.roles.algorithms.advantages import ADVANTAGES, group_mean, group_mean_std, of_tokens
from rondo.runtime.errors import Fatal


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


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_equal_rewards_give_no_advantage(name: str, size: int) -> None:
    advantages = ADVANTAGES[name](np.full(size, 0.1, np.float32))  # type: ignore[index]
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, np.zeros(size), atol=1e-8)


@pytest.mark.parametrize("name", ADVANTAGES)
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
