"""What a process does so that equal work gives equal bits: one thread, torch's deterministic algorithms, seeded generators.

Owns these process-wide switches. Does not own what makes the work itself equal: which rows share a micro-batch (`fixed` streams
of `comm/bus/rounds.py`), the engine's shapes (`fixed_shapes` of `rollout/slots.py`), seeds of samples (`rollout/evaluation.py`).
Which settings contradict determinism is said where they are (`config.py`, `launch/config.py`).

    settle(config)       # on the compute thread, before the model is loaded
    seed(7, rank=0)      # in the process that trains
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from rondo.roles.config import JobConfig


def settle(config: JobConfig) -> None:
    """With `deterministic`, this process computes on one thread and refuses operations whose result varies."""
    if config.deterministic:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


def seed(run_seed: int, rank: int) -> None:
    """Python's, numpy's and torch's generators, different on every rank. A restored version brings its own states."""
    drawn = int.from_bytes(hashlib.blake2b(f"{run_seed}/train/{rank}".encode(), digest_size=8).digest(), "little")
    random.seed(drawn)
    np.random.seed(drawn % 2**32)  # the one that user code draws from
    torch.manual_seed(drawn >> 1)
