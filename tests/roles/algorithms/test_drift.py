"""What losses are told of a whole step: by hand, against a sorted scan, and however the rows lie on ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.drift import DRIFTS, effective_samples, second_moment

M2PO, P3O = AlgorithmConfig(name="m2po", clip_low=0.01, clip_high=0.01), AlgorithmConfig(name="p3o")


def alone(values: Sequence[float]) -> Sequence[float]:
    return values


def test_equal_ratios_are_as_good_as_samples_of_the_policy_itself() -> None:
    assert effective_samples(np.zeros(7), np.ones(7), P3O, alone) == {"ess": 1.0}
    assert effective_samples(np.zeros(0), np.zeros(0), P3O, alone) == {"ess": 1.0}
    # Ratios 3 and 1: 16 / (2 x 10).
    assert effective_samples(np.log([3.0, 1.0]), np.ones(2), P3O, alone)["ess"] == pytest.approx(0.8)


def test_only_tokens_that_went_where_their_advantage_pushes_count_in_the_second_moment() -> None:
    ratios, advantages = np.array([0.1, -0.2, -5.0, 5.0, 0.0]), np.array([1.0, -1, 1, -1, 1])
    found = second_moment(ratios, advantages, M2PO.model_copy(update={"m2_budget": 0.03}), alone)
    assert found == {"m2": pytest.approx((0.01 + 0.04) / 2), "m2_clip_low": 1.0, "m2_clip_high": 1e9}


def test_beyond_its_budget_the_second_moment_is_brought_to_it() -> None:
    # (0.01 + min(1, tau^2)) / 2 = 0.02 at tau^2 = 0.03.
    algorithm, tau = M2PO.model_copy(update={"m2_budget": 0.02}), math.sqrt(0.03)
    found = second_moment(np.array([0.1, -1.0]), np.array([1.0, -1]), algorithm, alone)
    assert found["m2_clip_low"] == pytest.approx(1 - math.exp(-tau)) and found["m2"] == pytest.approx(0.505)
    assert found["m2_clip_high"] == pytest.approx(math.exp(tau) - 1)
    # Never tighter than the record's own clips.
    found = second_moment(np.array([0.1, -1.0]), np.array([1.0, -1]), AlgorithmConfig(name="m2po"), alone)
    assert (found["m2_clip_low"], found["m2_clip_high"]) == (0.3, 0.5)


def by_scan(ratios: np.ndarray, advantages: np.ndarray, budget: float) -> float:
    """tau by sorting: the k least squares count as they are, the others as tau^2."""
    squares = np.sort([d * d for d, a in zip(ratios, advantages, strict=True) if (a > 0) == (d > 0)])
    for k, before in enumerate(np.cumsum([0.0, *squares[:-1]])):
        tau2 = (budget * len(squares) - before) / (len(squares) - k)
        if tau2 <= squares[k]:
            return math.sqrt(tau2)
    raise AssertionError("within the budget")


@pytest.mark.parametrize("name", DRIFTS)
def test_the_rows_may_lie_on_ranks_as_they_will(name: str) -> None:
    draw = np.random.default_rng(0)
    ratios, advantages = draw.normal(0, 0.3, 500), draw.normal(size=500)
    algorithm = {"m2po": M2PO, "p3o": P3O}[name]
    whole = DRIFTS[name](ratios, advantages, algorithm, alone)
    if name == "m2po":
        assert whole["m2_clip_low"] == pytest.approx(
            1 - math.exp(-by_scan(ratios, advantages, algorithm.m2_budget)), rel=1e-9
        )
    # A rank asks for a sum where the others have told theirs: each is run as often as there are sums.
    parts = [slice(0, 3), slice(3, 3), slice(3, 500)]
    sums: list[list[float]] = []

    def told(mine: list[list[float]], values: Sequence[float]) -> Sequence[float]:
        mine.append(list(values))
        if len(mine) > len(sums):
            raise StopIteration
        return sums[len(mine) - 1]

    def asked(
        part: slice, answer: Callable[[list[list[float]], Sequence[float]], Sequence[float]]
    ) -> list[list[float]]:
        mine: list[list[float]] = []
        with contextlib.suppress(StopIteration):
            results.append(DRIFTS[name](ratios[part], advantages[part], algorithm, partial(answer, mine)))
        return mine

    while True:
        results: list[dict[str, float]] = []
        asks = [asked(part, told) for part in parts]
        if results:
            break
        sums.append([sum(values) for values in zip(*(each[-1] for each in asks), strict=True)])
    assert len(sums) <= 2  # each waits for the device
    assert len(results) == 3 and results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(whole, rel=1e-9)
