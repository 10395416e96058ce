"""The critic's loss: a pure function on values of response tokens, summed and not yet divided.

Owns the formula and what is measured beside it. Does not own the critic's forward (`roles/training/values.py`), nor returns
(`values.py`).

Invariant: as of a policy loss (`losses.py`): `value_sums` of a whole step equals the sum over any cut of it into micro-batches
and ranks. Tokens without a return, which is NaN then, are selected out and never multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rondo.roles.algorithms.sums import LossSums

_MOMENTS = ("returns_square", "error_mean", "error_square")
"""Of what explained variance is made."""


def value_sums(
    values: torch.Tensor, *, old_values: torch.Tensor, returns: torch.Tensor, num_samples: int, clip: float | None
) -> LossSums:
    """The undivided value loss of some tokens [N], each max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2, after
    Schulman et al.'s own code of PPO (2017); None: no clip. `values` carries the gradient; `old_values` are those that `returns`
    were made with. `clip_fraction`: tokens whose loss the clip held back from their value.
    """
    keep = returns.isfinite()

    def chosen(found: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, found, 0.0)

    values, old_values, returns = chosen(values), chosen(old_values), chosen(returns)
    square, clipped = (values - returns).square(), torch.zeros_like(keep)
    if clip is not None:
        near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        clipped = near > square.detach()
        square = torch.maximum(square, near)
    loss, error = square / 2, returns - old_values
    measured = {
        "value_loss": loss.detach(), "clip_fraction": clipped, "values_mean": values.detach(), "returns_mean": returns,
        "returns_square": returns.double().square(), "error_mean": error, "error_square": error.double().square(),
    }  # fmt: skip
    sums = {
        "tokens": keep.sum(dtype=torch.float64),
        "samples": torch.tensor(num_samples, dtype=torch.float64, device=values.device),
        **{name: chosen(found).sum(dtype=torch.float64) for name, found in measured.items()},
    }
    return LossSums(loss.sum(), sums)


def with_explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step, with `explained_variance` in the place of the moments that it is made of: the part of the returns'
    variance that the values they were made with explain, 1 - Var(R - V) / Var(R): 1 of a perfect critic, 0 of a constant. Left
    out where all returns are equal."""
    found = {name: value for name, value in metrics.items() if name not in _MOMENTS}
    variance = metrics["returns_square"] - metrics["returns_mean"] ** 2
    unexplained = metrics["error_square"] - metrics["error_mean"] ** 2
    return found | ({"explained_variance": 1 - unexplained / variance} if variance > 1e-12 else {})
