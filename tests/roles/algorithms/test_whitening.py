"""Whitening of a step's advantages: by hand, against numpy, and whatever the order of the samples."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rondo.roles.algorithms.whitening import Contribution, Whitening, contribution


def test_by_hand_over_tokens_and_over_samples() -> None:
    long, short = np.array([1, 9, 1, 1], np.float32), np.array([-1], np.float32)
    mask = np.array([1, 0, 1, 1], np.uint8)
    ones = np.ones(1, np.uint8)
    tokens = Whitening.of([contribution(long, mask, "tokens"), contribution(short, ones, "tokens")])
    assert (tokens.mean, tokens.deviation) == (0.5, pytest.approx(0.75**0.5))  # 1 1 1 -1
    samples = Whitening.of([contribution(long, mask, "samples"), contribution(short, ones, "samples")])
    assert (samples.mean, samples.deviation) == (0.0, 1.0)  # 1 -1
    assert tokens.apply(long, mask).tolist() == pytest.approx([0.5 / 0.75**0.5, 0, *[0.5 / 0.75**0.5] * 2])


def test_the_result_has_mean_0_and_deviation_1_over_unmasked_tokens_as_numpy_computes_them() -> None:
    draw = np.random.default_rng(0)
    rows = [(draw.normal(3, 2, n).astype(np.float32), (draw.random(n) < 0.7).astype(np.uint8)) for n in range(1, 40)]
    made = Whitening.of([contribution(*row, "tokens") for row in rows])
    values = np.concatenate([advantages[mask > 0] for advantages, mask in rows]).astype(np.float64)
    assert (made.mean, made.deviation) == pytest.approx((values.mean(), values.std()), rel=1e-12)
    white = np.concatenate([made.apply(*row)[row[1] > 0] for row in rows])
    assert (white.mean(), white.std()) == pytest.approx((0, 1), abs=1e-6)


def test_the_order_of_the_samples_changes_no_bit() -> None:
    draw = np.random.default_rng(1)
    parts: list[Contribution] = [
        contribution(draw.normal(0, 10.0**k, 7).astype(np.float32), np.ones(7, np.uint8), "tokens")
        for k in range(-6, 6)
    ]
    wanted = Whitening.of(parts)
    for seed in range(20):
        random.Random(seed).shuffle(parts)
        assert Whitening.of(parts) == wanted


def test_equal_advantages_and_masked_samples_give_0() -> None:
    same, mask = np.full(3, 0.25, np.float32), np.ones(3, np.uint8)
    made = Whitening.of([contribution(same, mask, "tokens")] * 4 + [contribution(same, 0 * mask, "tokens")])
    assert not made.apply(same, mask).any()
    assert Whitening.of([]) == Whitening.of([contribution(same, 0 * mask, "samples")]) == Whitening(0.0, 0.0)
