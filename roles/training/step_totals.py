"""What the rows of a step were: sums over its rounds, then over all ranks, and the metrics that they make.

Owns how rows are counted: tokens, rewards, and how many versions old tokens and samples are. Does not own what the trainer makes
of them (`backend.py`), nor when a step is over (`roles/actor.py`).

    totals.add(rows, ages) ...        metrics |= totals.of(sum_over_ranks(totals.sums()))

Invariant: additive; a row counts in the first pass over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rondo.comm.bus.bus import Row


class StepTotals:
    def __init__(self, max_staleness: int) -> None:
        self._num_ages = max_staleness + 1
        self._num_tokens, self._rewards = 0, np.zeros(4)  # `reward_sums`
        self._ages: list[np.ndarray] = []

    def add(self, rows: Sequence[Row], ages: Iterable[np.ndarray]) -> None:
        """ages: int64 [sampled tokens] of each row, in versions."""
        self._num_tokens += sum(row.length for row in rows)
        self._rewards += reward_sums(rows)
        self._ages += ages

    def sums(self) -> list[float]:
        """Of this rank."""
        by_sample = np.bincount([int(each.max()) for each in self._ages if len(each)], minlength=self._num_ages)
        by_token = np.bincount(np.concatenate([np.zeros(0, np.int64), *self._ages]), minlength=self._num_ages)
        return [*map(float, (self._num_tokens, *by_sample, *by_token)), *self._rewards.tolist()]

    def of(self, summed: Sequence[float]) -> dict[str, Any]:
        """The metrics of `sums` over all ranks."""
        tokens, *counts = summed
        by_sample, by_token = counts[: self._num_ages], counts[self._num_ages : 2 * self._num_ages]
        rewards = reward_figures(counts[2 * self._num_ages :])
        return rewards | {
            "tokens": int(tokens),
            "staleness_mean": sum(age * count for age, count in enumerate(by_sample)) / rewards["num_samples"],
            "staleness_max": max(age for age, count in enumerate(by_sample) if count),
            "staleness_tokens": {str(age): int(count) for age, count in enumerate(by_token) if count},
        }


def reward_sums(rows: Iterable[Row]) -> np.ndarray:
    """The sum of the rewards of some samples, how many have one, how many samples, and how many of them their limit cut off."""
    scores = [(row.reward, row.finish == "length") for row in rows]
    given = [reward for reward, _ in scores if reward is not None]
    return np.array([sum(given), len(given), len(scores), sum(cut_off for _, cut_off in scores)], np.float64)


def reward_figures(sums: Sequence[float]) -> dict[str, Any]:
    """Of the sums over a whole step: the mean reward is of the samples that have one, and None without any."""
    total, num_scored, num_samples, num_cut_off = sums
    return {
        "reward_mean": total / num_scored if num_scored else None, "num_samples": int(num_samples),
        "num_failed": int(num_samples - num_scored), "truncated_fraction": num_cut_off / num_samples,
    }  # fmt: skip
