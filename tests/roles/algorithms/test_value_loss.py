"""The critic's loss: by hand, against finite differences, however it is cut, and how much of the returns values explain."""

from __future__ import annotations

import pytest
import torch

from rondo.roles.algorithms.value_loss import value_sums, with_explained_variance


def sums(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None = 0.2) -> float:
    return float(value_sums(values, old_values=old, returns=returns, num_samples=1, clip=clip).loss.detach())


def test_tokens_by_hand() -> None:
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, float("nan")])
    values = torch.tensor([0.5, 0.1, 0.5, float("nan")], requires_grad=True)
    made = value_sums(values, old_values=old, returns=returns, num_samples=2, clip=0.2)
    made.loss.backward()
    # Beyond the clip and nearer to its return: held back, without gradient; within it; beyond it and further: the full square.
    assert float(made.loss.detach()) == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 2)
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0, -0.9, 1.5, 0])
    metrics = made.metrics()
    assert (metrics["tokens"], metrics["samples"], metrics["clip_fraction"]) == (3, 2, pytest.approx(1 / 3))
    assert metrics["returns_mean"] == pytest.approx(1 / 3) and metrics["values_mean"] == pytest.approx(1.1 / 3)
    assert sums(values, old, returns, clip=None) == pytest.approx((0.5**2 + 0.9**2 + 1.5**2) / 2)


def test_the_gradient_is_that_of_finite_differences_and_the_loss_the_sum_of_its_parts() -> None:
    torch.manual_seed(0)
    values, old, returns = (torch.randn(40, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    value_sums(values, old_values=old, returns=returns, num_samples=1, clip=0.2).loss.backward()
    assert values.grad is not None
    for at in range(40):
        step = torch.zeros(40, dtype=torch.float64)
        step[at] = 1e-6
        found = [sums(values.detach() + sign * step, old, returns) for sign in (1, -1)]
        assert float(values.grad[at]) == pytest.approx((found[0] - found[1]) / 2e-6, abs=1e-6)
    parts = [sums(values[cut], old[cut], returns[cut]) for cut in (slice(0, 7), slice(7, 40))]
    assert sum(parts) == pytest.approx(sums(values, old, returns))


def test_explained_variance_is_1_for_the_returns_themselves_0_for_a_constant_and_left_out_where_none_is() -> None:
    torch.manual_seed(1)
    returns = torch.randn(200, dtype=torch.float64) + 3

    def explained(old: torch.Tensor, of: torch.Tensor = returns) -> dict[str, float]:
        found = value_sums(old, old_values=old, returns=of, num_samples=1, clip=None)
        return with_explained_variance(found.metrics())

    assert explained(returns)["explained_variance"] == pytest.approx(1)
    assert explained(torch.full_like(returns, 7))["explained_variance"] == pytest.approx(0, abs=1e-9)
    noisy = returns + torch.randn(200, dtype=torch.float64)
    wanted = 1 - float((returns - noisy).var(correction=0) / returns.var(correction=0))
    assert explained(noisy)["explained_variance"] == pytest.approx(wanted)
    assert "error_mean" not in explained(noisy) and "explained_variance" not in explained(returns, torch.ones(200))
