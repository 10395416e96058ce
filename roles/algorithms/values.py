"""Values: from the rewards of a sample's tokens and a critic's values of them to advantages and returns.

Owns generalized advantage estimation, and where a sample's reward stands among its tokens. Does not own the critic's loss
(`value_loss.py`), nor who scores values (`roles/critic.py`). numpy only: the role that runs it needs no torch.

    value of a token: what the critic expects from the state in which it is sampled, before it is
    rewards [0, 0, 1], values [.5, .6, .8], gamma 1, lambda 1      ->  advantages [.5, .4, .2], returns [1, 1, 1]

Invariant: only tokens that the policy sampled are actions. What stands between them (an environment's words, masked tokens) is
stepped over, and may hold anything; the result depends on this sample alone.
"""

from __future__ import annotations

import numpy as np


def token_rewards(reward: float, mask: np.ndarray, penalties: np.ndarray | None = None) -> np.ndarray:
    """float64 [R]: the reward at the last unmasked token, less the `penalties` [R] of each (as a KL in the reward is one)."""
    found = np.zeros(len(mask)) if penalties is None else -np.where(mask > 0, penalties, 0.0).astype(np.float64)
    sampled = np.flatnonzero(mask)
    if len(sampled):
        found[sampled[-1]] += reward
    return found


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_after: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns), float32 [R] each: generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438,
    equations 11 and 16) over the unmasked tokens, which follow each other directly:

        delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1        return_t = A_t + V_t

    rewards, values: [R], masked ones may hold anything. value_after: V behind the last token; 0 where the sample ended there.
    Masked tokens get advantage 0 and the return NaN: they have none.
    """
    sampled = np.flatnonzero(mask)
    advantages, returns = np.zeros(len(mask), np.float32), np.full(len(mask), np.nan, np.float32)
    chosen = values[sampled].astype(np.float64)
    found = rewards[sampled] + gamma * np.append(chosen, value_after)[1:] - chosen
    reach, weight = 1, gamma * lam  # every pass doubles how many of the differences behind a token are in its sum
    while reach < len(found) and weight:
        found[:-reach] += weight * found[reach:]
        reach, weight = 2 * reach, weight * weight
    advantages[sampled], returns[sampled] = found, found + chosen
    return advantages, returns
