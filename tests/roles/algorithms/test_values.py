"""Advantages and returns of a critic's values: by hand, against another way to compute them, and what stands between tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rondo.roles.algorithms.values import gae, token_rewards


def by_hand(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float, after: float) -> np.ndarray:
    """Equation 16 of the paper as it stands: a sum of discounted temporal differences for every token, in float64."""
    following = np.append(values[1:], after)
    deltas = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** i * delta for i, delta in enumerate(deltas[t:])) for t in range(len(deltas))])


def test_a_sample_by_hand() -> None:
    values, mask = np.array([0.5, 0.6, 0.8], np.float32), np.ones(3, np.uint8)
    advantages, returns = gae(token_rewards(1.0, mask), values, mask)
    assert advantages.tolist() == pytest.approx([0.5, 0.4, 0.2]) and returns.tolist() == [1, 1, 1]
    advantages, returns = gae(token_rewards(1.0, mask), values, mask, gamma=0.5, lam=0.0)  # one step ahead
    assert advantages.tolist() == pytest.approx([0.3 - 0.5, 0.4 - 0.6, 0.2])
    assert returns.tolist() == pytest.approx([0.3, 0.4, 1.0])
    advantages, _ = gae(token_rewards(1.0, mask), values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == pytest.approx([-0.2 + 0.25 * (-0.2 + 0.25 * 0.2), -0.2 + 0.25 * 0.2, 0.2])


def test_what_was_cut_off_may_be_worth_what_the_critic_expects_behind_it() -> None:
    values, mask = np.array([0.5, 0.5], np.float32), np.ones(2, np.uint8)
    advantages, returns = gae(token_rewards(0.0, mask), values, mask, gamma=0.9, value_after=1.0)
    assert advantages.tolist() == pytest.approx([0.81 - 0.5, 0.9 - 0.5]) and returns.tolist() == pytest.approx(
        [0.81, 0.9]
    )


def test_the_reward_stands_at_the_last_token_that_was_sampled_less_a_penalty_of_each() -> None:
    mask, penalties = np.array([1, 0, 1, 0], np.uint8), np.array([0.1, np.nan, 0.2, np.nan], np.float32)
    assert token_rewards(2.0, mask, penalties).tolist() == pytest.approx([-0.1, 0, 1.8, 0])
    assert token_rewards(2.0, np.zeros(2, np.uint8)).tolist() == [0, 0]


def test_random_samples_as_the_sum_of_the_paper_gives_them_whatever_stands_between_their_tokens() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        size, gamma, lam, after = int(draw.integers(1, 30)), draw.uniform(0.1, 1), draw.uniform(0, 1), draw.normal()
        mask = (draw.random(size) < 0.7).astype(np.uint8)
        rewards, values = draw.normal(size=size), draw.normal(size=size).astype(np.float32)
        values[mask == 0] = np.nan
        kept = mask > 0
        wanted = by_hand(rewards[kept], values[kept].astype(np.float64), gamma, lam, after)
        advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, value_after=after)
        np.testing.assert_allclose(advantages[kept], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(returns[kept], wanted + values[kept], rtol=1e-5, atol=1e-6)
        assert not advantages[~kept].any() and np.isnan(returns[~kept]).all()
