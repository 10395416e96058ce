"""Post-processing: what a user's function makes of the rewards of a prompt group, or of a step, before advantages.

Owns what the function is given, and what it may return. Does not own which samples come together (`roles/advantages.py`).

    def postprocess(rewards, samples):                       # reward.postprocess
        return rewards - rewards.mean()

    process_of("mine.py:postprocess")(np.array([1, 0], np.float32), samples)  ->  float64 [0.5, -0.5]

Invariant: one finite number for each sample comes out, in their order; rewards as they were given stay with their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rondo.runtime.errors import Fatal
from rondo.runtime.reference import in_one_line, load_reference

SETTING = "reward.postprocess"


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A sample that has a reward, as the function sees it."""

    group: int
    """Number of its prompt group, the same for all samples of a prompt."""
    number: int
    """Its place in that group, from 0."""
    num_tokens: int
    """Of its response, those that train."""
    finish: str
    """Why it ended: "stop", "length" or another."""
    components: Mapping[str, float]
    """Of its reward, where `reward.components` names some."""
    source: str
    """Which of `data.sources` its row is of; empty without these."""


Process = Callable[[np.ndarray, Sequence[Rewarded]], np.ndarray]


def process_of(reference: str) -> Process:
    """(rewards float32 [n], samples) -> float64 [n]. ConfigError for a function that cannot be had; Fatal for an error in it, and
    for another length or what is not finite: no restart repairs it."""
    function = load_reference(reference, SETTING)

    def process(rewards: np.ndarray, samples: Sequence[Rewarded]) -> np.ndarray:
        try:
            found = np.asarray(function(rewards.copy(), samples), np.float64)
        except Exception as error:
            raise Fatal(
                f"{SETTING} must not fail, got {in_one_line(error)} of {len(samples)} rewards. Correct it"
            ) from error
        largest = float(np.finfo(np.float32).max) / 2  # so that differences between two of them are float32, too
        fits = np.abs(found) <= largest
        if found.shape != rewards.shape or not fits.all():
            got = f"shape {list(found.shape)}" if found.shape != rewards.shape else f"{found[~fits][0]:g}"
            raise Fatal(
                f"{SETTING} must return one number of at most {largest:.2g} in size for each of {len(samples)} rewards, got "
                f"{got}. Correct it"
            )
        return found

    return process
