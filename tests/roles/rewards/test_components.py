"""Rewards of several components: what a function returns, and what its score is."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rondo.roles.rewards.scores import RewardError, scored, scored_group
from rondo.runtime.values import decode

COMPONENTS = {"right": 1.0, "short": 0.5}


def read(encoded: Any) -> Any:
    return decode(orjson.loads(encoded.text))


def test_the_score_is_the_weighted_sum_unless_the_function_says_one() -> None:
    assert read(scored({"right": True, "short": 0.5, "why": "x"}, COMPONENTS)) == [
        1.25,
        {"right": 1.0, "short": 0.5, "why": "x"},
    ]
    assert read(scored({"right": 1, "short": 0, "score": 7}, COMPONENTS)) == [7.0, {"right": 1.0, "short": 0.0}]
    assert read(scored_group([{"right": 0, "short": 1}] * 2, COMPONENTS)) == [[0.5, {"right": 0.0, "short": 1.0}]] * 2


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (
            1.0,
            "reward must return a dict with each of reward.components, got 1.0 without right, short. Add what is missing",
        ),
        ({"right": 1}, "without short"),
        ({"right": None, "short": 0}, "reward must return a number"),
        ({"right": float("nan"), "short": 0}, "reward must return a finite number, got nan"),
    ],
)
def test_a_component_that_is_missing_or_no_number_is_an_error_of_the_function(value: Any, error: str) -> None:
    with pytest.raises(RewardError, match=error.replace("(", r"\(")):
        scored(value, COMPONENTS)


@pytest.mark.parametrize(
    ("value", "components"),
    [
        (1e39, {}), (-1e300, {}), (10**40, {}), ({"score": 3.5e38}, {}), ({"right": 1e39, "short": 0}, COMPONENTS),
        ({"right": 1e38, "short": 1.6e38}, COMPONENTS), ({"right": 1, "short": 0}, {"right": 1e39, "short": 1.0}),
    ],
)  # fmt: skip
def test_a_reward_whose_differences_do_not_fit_into_float32_is_an_error_of_the_function(
    value: Any, components: dict[str, float]
) -> None:
    with pytest.raises(RewardError, match=r"^reward must be a number of at most 1.7e\+38 in size, got -?[0-9.]+e\+"):
        scored(value, components)
