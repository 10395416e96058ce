"""Sums whose micro-batches and ranks measured different things, as a user's loss may."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rondo.roles.algorithms import losses
from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.batch import Batch
from rondo.roles.algorithms.losses import policy_sums
from rondo.roles.algorithms.sums import LossSums
from rondo.runtime.errors import Fatal

EVERY = {"policy_loss": "tests.roles.algorithms.test_sums:loss_that_measures_now_and_then"}


def sums_of(tokens: int, *, maxes: dict[str, float] | None = None, **measured: float) -> LossSums:
    """Sums over so many tokens of one sample, each measured of all of them."""
    number = lambda value: torch.tensor(float(value), dtype=torch.float64)  # noqa: E731
    return LossSums(
        number(1),
        {"tokens": number(tokens), "samples": number(1)} | {name: number(value) for name, value in measured.items()},
        {name: number(value) for name, value in (maxes or {}).items()},
        {name: number(tokens) for name in measured},
    )


PARTS = [
    sums_of(10, of_all=5, early=4, maxes={"top": 2}),
    sums_of(30, of_all=3, late=6),
    sums_of(20, late=2, of_all=1, early=1, maxes={"top": 1, "other": -1}),
]
WANTED = {
    "tokens": 60, "samples": 3, "of_all": 9 / 60, "early": 5 / 30, "late": 8 / 50, "top": 2, "other": -1,
}  # fmt: skip


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_a_metric_of_some_micro_batches_is_the_mean_over_their_tokens(order: list[int]) -> None:
    first, second, third = (PARTS[at] for at in order)
    assert (first + second + third).metrics() == pytest.approx(WANTED)


def on_ranks(parts: list[LossSums]) -> list[LossSums]:
    store = dist.HashStore()

    def reduced(rank: int) -> LossSums:
        return parts[rank].reduced(dist.ProcessGroupGloo(store, rank, len(parts)))

    with ThreadPoolExecutor(len(parts)) as ranks:
        return list(ranks.map(reduced, range(len(parts))))


def test_a_metric_of_some_ranks_is_the_mean_over_their_tokens() -> None:
    for found in on_ranks(PARTS):
        assert found.metrics() == pytest.approx(WANTED)
        assert float(found.loss) == 3


def test_ranks_that_measured_the_same_share_no_names() -> None:
    parts = [sums_of(1, a=1, b=2), sums_of(3, a=5, b=6)]
    for found in on_ranks(parts):
        assert found.metrics() == {"tokens": 4, "samples": 2, "a": 6 / 4, "b": 8 / 4}


def loss_that_measures_now_and_then(batch: Batch, algorithm: AlgorithmConfig) -> Any:
    rises = batch.advantages > 0
    return -batch.ratio() * batch.advantages, {"risen": batch.ratio().detach()} if rises.any() else {}


def made(advantage: float, tokens: int) -> dict[str, Any]:
    zeros = torch.zeros(tokens)
    return {
        "log_probs": zeros.clone().requires_grad_(), "rollout_log_probs": zeros, "old_log_probs": zeros,
        "advantages": torch.full((tokens,), advantage), "mask": torch.ones(tokens), "lengths": [tokens],
    }  # fmt: skip


def test_what_a_loss_measures_of_some_micro_batches_alone_is_not_diluted_by_the_others() -> None:
    algorithm = AlgorithmConfig(name="mine", own=True, **EVERY)
    total = policy_sums(algorithm, **made(-1, 30)) + policy_sums(algorithm, **made(1, 10))
    assert total.metrics()["risen"] == 1.0


@pytest.mark.parametrize("name", ["tokens", "kl", "kept_fraction"])
def test_a_loss_must_not_measure_under_the_name_of_one_of_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(batch: Batch, algorithm: AlgorithmConfig) -> Any:
        return -batch.advantages * batch.log_probs, {name: batch.ratio()}

    monkeypatch.setitem(losses.POLICY_LOSSES, "ppo_clip", loss)  # type: ignore[index]
    with pytest.raises(Fatal, match=f"algorithm.policy_loss must measure under names of its own, got '{name}'"):
        policy_sums(AlgorithmConfig(), **made(1, 3))
