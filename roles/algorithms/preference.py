"""Losses of pairs of answers, one of which is better: pure functions on log-probs of whole answers, or on their rewards, summed
and not yet divided.

Owns the formulas of direct preference optimisation and of reward models, and what is measured beside them. Does not own the
forward, nor where the reference's log-probs come from (`roles/training/preference.py`).

Invariant: as of a policy loss (`losses.py`): the sums of a whole step equal the sum over any cut of it into micro-batches and
ranks. "tokens" are those of all answers, "samples" the pairs, by which everything else is divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rondo.roles.algorithms.sums import LossSums

if TYPE_CHECKING:
    from rondo.roles.config import DpoConfig, RewardModelConfig


_SURE = 1e-6
"""In nats a token: answers that are surer have the odds of these."""


def preference_sums(
    config: DpoConfig,
    *,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    chosen_tokens: torch.Tensor,
    rejected_tokens: torch.Tensor,
) -> LossSums:
    """The undivided loss of P pairs, all [P]: log-probs of answers summed over their tokens, in nats, and how many these are.

    With h = (log pi(chosen) - log pi_ref(chosen)) - (the same of rejected), each over its tokens where `length_normalized`, and
    m = beta h - margin: "sigmoid" -(1 - s) log sigmoid(m) - s log sigmoid(-m), s the label smoothing (Rafailov et al. 2023,
    equation 7; Mitchell 2023); without reference, normalized, with a margin SimPO's (Meng et al. 2024, equation 6). "hinge"
    max(0, 1 - m) (Zhao et al. 2023, SLiC). "ipo" (h - 1 / (2 beta))^2, h always over tokens (Azar et al. 2023, equation 17).
    "orpo" -l(chosen) - beta log sigmoid(odds(chosen) - odds(rejected)), l over tokens, without reference, odds(l) =
    l - log(1 - exp l) (Hong et al. 2024, equations 6 and 7, of answers alone).
    Metrics have TRL's names: rewards are beta times the log-ratio.
    """
    better, worse = chosen - reference_chosen, rejected - reference_rejected
    if config.length_normalized or config.loss in ("ipo", "orpo"):
        better, worse = better / chosen_tokens, worse / rejected_tokens
    gap = better - worse
    margin, smoothing = config.beta * gap - config.margin, config.label_smoothing
    if config.loss == "ipo":
        losses = (gap - 1 / (2 * config.beta)).square()
    elif config.loss == "orpo":
        odds = [each - torch.log(-torch.expm1(each.clamp(max=-_SURE))) for each in (better, worse)]
        losses = -better - config.beta * F.logsigmoid(odds[0] - odds[1])
    elif config.loss == "hinge":
        losses = torch.relu(1 - margin)
    else:
        losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    rewards = {"rewards/chosen": config.beta * better.detach(), "rewards/rejected": config.beta * worse.detach()}
    return _summed(
        losses, rewards, chosen_tokens + rejected_tokens, {"logps/chosen": chosen, "logps/rejected": rejected}
    )


def reward_sums(
    config: RewardModelConfig,
    *,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    num_tokens: torch.Tensor,
    margins: torch.Tensor | float = 0.0,
) -> LossSums:
    """The undivided loss of P pairs, all [P]: rewards r of both answers, how many tokens these have together, and what of the
    margin is the pair's own.

    -log sigmoid(r(chosen) - r(rejected) - margin) (Ouyang et al. 2022, equation 1; the margin of Touvron et al. 2023, equation 2)
    + c (r(chosen) + r(rejected))^2, c the `center_rewards_coef` (Eisenstein et al. 2023)."""
    losses = -F.logsigmoid(chosen - rejected - config.margin - margins)
    losses = losses + config.center_rewards_coef * (chosen + rejected).square()
    return _summed(losses, {"rewards/chosen": chosen.detach(), "rewards/rejected": rejected.detach()}, num_tokens, {})


def _summed(
    losses: torch.Tensor, rewards: dict[str, torch.Tensor], tokens: torch.Tensor, beside: dict[str, torch.Tensor]
) -> LossSums:
    """rewards: of the better answers, and of the worse."""
    better, worse = rewards.values()
    figures = rewards | {"rewards/margins": better - worse, "rewards/accuracies": better > worse} | beside
    counts = {"tokens": tokens, "samples": torch.ones_like(tokens)}
    return LossSums(
        losses.sum(), {name: found.detach().sum(dtype=torch.float64) for name, found in (counts | figures).items()}
    )
