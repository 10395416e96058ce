"""Rates: what an engine did since it was last looked at, from two of its snapshots.

rates = Rates(num_devices=1); rates.since(engine.stats())      ->   {"tokens_per_s": ..., "prefix_cache_hit_rate": ..., ...}
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rondo.roles.engines.engine import EngineStats


class Rates:
    """num_devices: of the engine; 0 where they are somebody else's. clock: seconds."""

    def __init__(self, num_devices: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_devices, self._clock = num_devices, clock
        self._before, self._at = (0, 0, 0, 0), clock()

    def since(self, now: EngineStats) -> dict[str, float]:
        """Nothing of what cannot be said: a share of no tokens."""
        at, counts = (
            self._clock(),
            (now.tokens_generated, now.decode_steps, now.prefill_tokens, now.shared_prompt_tokens),
        )
        tokens, steps, computed, shared = (max(0, a - b) for a, b in zip(counts, self._before, strict=True))
        per_s = tokens / max(at - self._at, 1e-9)
        self._before, self._at = counts, at
        found = {"tokens_per_s": per_s}
        if self._num_devices:
            found["tokens_per_s_per_device"] = per_s / self._num_devices
        if steps:
            found["sequences_per_step"] = tokens / steps
        if computed + shared:
            found["prefix_cache_hit_rate"] = shared / (computed + shared)
        return found
