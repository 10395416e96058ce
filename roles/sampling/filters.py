"""Filters: which whole prompt groups are trained; another prompt takes the place of one that is not.

Owns what a filter sees of a group's samples, ours and the user's. Does not own where the user's runs (`roles/rewards/`) or what
becomes of the group (`groups.py`).

    def keep(samples):      # rollout.keep; [{"reward": 1.0, "finish_reason": "stop", "num_tokens": 12}, ...]
        return sum(sample["finish_reason"] == "length" for sample in samples) < len(samples) / 2

A reward is None where it failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.worker import Opened
from rondo.runtime.errors import RondoError
from rondo.runtime.reference import load_reference
from rondo.runtime.values import Encoded, encode


class Ended(NamedTuple):
    """What filters see of one sample."""

    reward: float | None
    finish_reason: str
    num_tokens: int


class KeepError(RondoError, ValueError):
    """A filter returned what is neither yes nor no."""


def open_keep(function: str) -> Opened:
    """The filter, as it is called and what it must return."""
    keep = load_reference(function, "rollout.keep")

    def decided(found: Any) -> Encoded:
        if found is None or not hasattr(found, "__bool__"):
            raise KeepError(
                f"rollout.keep must return True or False, got {found!r:.80}. Let each of its paths return one"
            )
        return encode(bool(found))

    return Opened(keep, decided, inspect.iscoroutinefunction(keep))


def equal_rewards(samples: Sequence[Ended]) -> bool:
    """Whether no sample is better than another, among those that have a reward."""
    return len({sample.reward for sample in samples} - {None}) == 1


async def kept(pool: UserFunction, samples: Sequence[Ended]) -> tuple[bool, str]:
    """(whether the user's filter keeps a group, why it could not say)."""
    [outcome] = await pool.run([encode([sample._asdict() for sample in samples])])
    return bool(outcome.value), outcome.error or ""
