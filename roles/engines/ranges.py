"""The numbers that a sample is drawn by: which of them are taken.

Owns the ranges, and the words for what lies outside. Whoever asks for a sample states its numbers through `engine.SamplingParams`
and `engine.Request`, which hold them to these; the settings of a run hold theirs to the same. Imports nothing but errors.

    TEMPERATURE.check(0.7)                 # 0.7
    TEMPERATURE.check(1e-50, "temperature")  # ConfigError: temperature must be 0 (greedy) or from 1e-06 to 1e+06, got 1e-50

Invariant: a number inside its range means the same in every engine, and none fails on it. In float32 a smaller temperature
or share would be 0 or divide to infinity; an engine's tensors and a server's take ids and counts of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from rondo.runtime.errors import ConfigError

N = TypeVar("N", int, float)
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """From `least` to `most`, both included; or `off`, which stands for what the words `meaning` say."""

    least: float
    most: float
    off: float | None = None
    meaning: str = ""

    def check(self, value: N, name: str = "") -> N:
        """The value. ConfigError for one outside, NaN included; `name` stands in front where it is given."""
        if self.least <= value <= self.most or value == self.off:
            return value
        other = "" if self.off is None else f"{self.off:g} ({self.meaning}) or "
        rule = f"must be {other}from {_shown(self.least)} to {_shown(self.most)}, got {value}. Choose one of these"
        raise ConfigError(f"{name} {rule}" if name else rule)


NEW_TOKENS = Range(1, _MOST_INT32)
TEMPERATURE = Range(1e-6, 1e6, 0, "greedy")
TOP_P = Range(1e-6, 1)
TOP_K = Range(1, _MOST_INT32, -1, "all tokens")
"""One beyond the vocabulary is no limit."""
TOKEN = Range(0, _MOST_INT32)
NUM_STOPS = Range(0, 1024)
"""Tokens that end one sample: an engine compares every new token with all of them."""
NUM_TOP = Range(0, 32)
"""Of the likeliest tokens at a place."""
SEED = Range(0, 2**63 - 1)
PRIORITY = Range(-_MOST_INT32, _MOST_INT32)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
