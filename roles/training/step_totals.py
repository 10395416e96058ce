"""What the rows of a step were: sums over its rounds, then over all ranks, and the metrics that they make.

Owns how rows are counted: tokens, rewards, by modality, source and component too, lengths and repetition of responses, and how
many versions old tokens and samples are.
Does not own what the trainer makes of them (`backend.py`), nor when a step is over (`roles/actor.py`).

    totals.add(rows, ages) ...        metrics |= totals.of(sum_over_ranks(totals.sums()))

Invariant: additive; a row counts in the first pass over it, and a sample with the first of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rondo.comm.bus.bus import Row
from rondo.comm.bus.group import NO_VERSION
from rondo.models.media.inputs import KINDS, kinds_of
from rondo.roles.forward import media_of
from rondo.roles.streams import PARTS, SOURCE
from rondo.roles.training.quantiles import LENGTHS, SHARES, UPPER, WHOLE, Counts, quantiles, repetition


class StepTotals:
    def __init__(self, max_staleness: int, sources: Sequence[str] = (), components: Sequence[str] = ()) -> None:
        self._num_ages = max_staleness + 1
        self._num_tokens, self._rewards = 0, np.zeros(4)  # `reward_sums`
        self._squares = 0
        self._shape = np.zeros(3)  # tokens of responses, sum of the parts of them that repeat, of how many rows
        self._lengths, self._repeated = Counts(LENGTHS), Counts(SHARES)
        self._sources = sources
        self.squares = 0.0
        """Of the whole step, once `of` was asked: the sum over its rows of the square of their tokens."""
        self._of_kinds = np.zeros((len(KINDS), 5))  # the same of each kind of rows, and their response tokens
        self._of_sources = np.zeros((len(sources), 5))
        self._components = components
        self._of_parts = np.zeros((len(components), 2))  # sum, and of how many samples
        self._ages: list[np.ndarray] = []

    def add(self, rows: Sequence[Row], ages: Iterable[np.ndarray]) -> None:
        """ages: int64 [sampled tokens] of each row, in versions."""
        tokens = [row.array("tokens") for row in rows]
        lengths, responses = np.array([len(each) for each in tokens], np.int64), [row.response for row in rows]
        self._num_tokens += int(lengths.sum())
        self._squares += int((lengths**2).sum())
        repeated = repetition([each[len(each) - num :] for each, num in zip(tokens, responses, strict=True)])
        self._shape += [sum(responses), repeated.sum(), len(repeated)]
        self._lengths.add(np.array(responses, np.int64))
        self._repeated.add(repeated)
        self._rewards += reward_sums(rows)
        for row in rows:
            media = media_of(row)
            for kind in kinds_of(media.modalities if media is not None else ()):
                self._of_kinds[KINDS.index(kind)] += [*reward_sums([row]), row.response]
            if self._components and not row.part:
                parts = row.array(PARTS).astype(np.float64)
                self._of_parts += np.stack([np.nan_to_num(parts), ~np.isnan(parts)], 1)
            if self._sources:
                self._of_sources[int(row.array(SOURCE)[0])] += [*reward_sums([row]), row.response]
        self._ages += ages

    def sums(self) -> list[float]:
        """Of this rank."""
        by_row = np.bincount([int(each.max()) for each in self._ages if len(each)], minlength=self._num_ages)
        by_token = np.bincount(np.concatenate([np.zeros(0, np.int64), *self._ages]), minlength=self._num_ages)
        named = np.concatenate([each.ravel() for each in (self._of_parts, self._of_kinds, self._of_sources)])
        shape = np.concatenate([self._shape, self._lengths.num, self._repeated.num])
        counts = map(float, (self._num_tokens, self._squares, *by_row, *by_token))
        return [*counts, *self._rewards.tolist(), *shape.tolist(), *named.tolist()]

    def of(self, summed: Sequence[float]) -> dict[str, Any]:
        """The metrics of `sums` over all ranks."""
        tokens, self.squares, *counts = summed
        sizes = [self._num_ages, self._num_ages, 4, 3, len(LENGTHS), len(SHARES)]
        by_row, by_token, rewards, shape, lengths, repeated, named = np.split(np.array(counts), np.cumsum(sizes))
        parts, named = np.split(named, [2 * len(self._components)])
        told = zip(self._components, parts.reshape(-1, 2).tolist(), strict=True)
        kinds, sources = np.split(named.reshape(-1, 5), [len(KINDS)])
        num_tokens, repeats, num_rows = shape.tolist()
        shares = quantiles(SHARES, repeated, UPPER)
        return (
            reward_figures(rewards.tolist())
            | {"response_tokens": num_tokens / max(1.0, rewards[2])}
            | {f"response_tokens_{name}": value for name, value in quantiles(LENGTHS, lengths, WHOLE).items()}
            | ({"repetition": repeats / num_rows} if num_rows else {})
            | {f"repetition_{name}": value for name, value in shares.items()}
            | (figures_of(KINDS, kinds) if kinds[1:].any() else {})
            | figures_of(self._sources, sources)
            | {f"component_{name}": total / number for name, (total, number) in told if number}
            | {
                "tokens": int(tokens),
                "staleness_mean": float(sum(age * count for age, count in enumerate(by_row)) / max(1, sum(by_row))),
                "staleness_max": max((age for age, count in enumerate(by_row) if count), default=0),
                "staleness_tokens": {str(age): int(count) for age, count in enumerate(by_token) if count},
            }
        )


def figures_of(names: Sequence[str], sums: np.ndarray) -> dict[str, Any]:
    """Of the sums [names, 5] over a whole step: reward, length and how many were cut off, of each that is there."""
    found: dict[str, Any] = {}
    for kind, (*rewards, tokens) in zip(names, sums.tolist(), strict=True):
        if num_samples := rewards[2]:
            told = reward_figures(rewards) | {"response_tokens": tokens / num_samples}
            found |= {f"{name}_{kind}": value for name, value in told.items() if name != "num_failed"}
    return found


def ages_of(policy_versions: np.ndarray, step: int) -> np.ndarray:
    """int64 [sampled tokens]: how many versions older than the one that a step trains on each of a row is."""
    return step - policy_versions[policy_versions != NO_VERSION].astype(np.int64)


def reward_sums(rows: Iterable[Row]) -> np.ndarray:
    """The sum of the rewards of some samples, how many have one, how many samples, and how many of them their limit cut off."""
    scores = [(row.reward, row.finish == "length") for row in rows if not row.part]
    given = [reward for reward, _ in scores if reward is not None]
    return np.array([sum(given), len(given), len(scores), sum(cut_off for _, cut_off in scores)], np.float64)


def reward_figures(sums: Sequence[float]) -> dict[str, Any]:
    """Of the sums over a whole step: the mean reward is of the samples that have one, and None without any."""
    total, num_scored, num_samples, num_cut_off = sums
    return {
        "reward_mean": total / num_scored if num_scored else None, "num_samples": int(num_samples),
        "num_failed": int(num_samples - num_scored), "truncated_fraction": num_cut_off / num_samples,
    }  # fmt: skip
