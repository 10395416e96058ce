"""Pairs of answers as the objective of a reward model, which gives a whole answer one number: that of a value head at its end.

Owns where an answer is scored: in the state behind its last token, as transformers' models for sequence classification do it.
Does not own what is made of a row (`preference.py`), the formula (`roles/algorithms/preference.py`), the head and its folder
(`models/value_head.py`), batches and steps (`supervised.py`).

    backend = open_reward_model(config, path, 100, world_size=1, device="cpu")
    Learning(backend, pair_encoder(...), ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rondo.models.logprobs import response_values
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.value_head import check_scores
from rondo.roles.algorithms.preference import reward_sums
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import JobConfig, RewardModelConfig
from rondo.roles.training.backend import Backend, Objective, Use, make_ready, open_model
from rondo.roles.training.determinism import seed
from rondo.roles.training.preference import DUMMY, Pair


def open_reward_model(
    config: JobConfig, path: str, num_steps: int, *, world_size: int, device: str
) -> Backend[RewardLoss]:
    """The model of a job with the weights at `path` and a head, that of the folder or a new one (collective). ConfigError for one
    that would be no model for sequence classification."""
    mesh = Mesh.open(config.train.mesh, world_size, device)
    seed(config.seed, mesh.rank)
    model, packing = open_model(config, path, mesh, device=device, values=True)
    check_scores(model)
    own = config.own
    assert isinstance(own, RewardModelConfig)
    return Backend(
        make_ready(model, config.train), RewardLoss(own, packing, device), own, num_steps=num_steps, mesh=mesh,
        offload=config.train.offload_optimizer, scales=config.train.dtype == "float16",
    )  # fmt: skip


def rewards_of(model: Any, packing: Packing, answers: Sequence[Packable], device: str | torch.device) -> torch.Tensor:
    """float32 [N], in the order of the `answers`. Prompts of equal answers are computed once where the model can (collective)."""
    values = response_values(model, packing.pack(answers, train=True, behind=True).to(device))
    ends = np.cumsum([each.response + 1 for each in answers]) - 1
    return values[torch.from_numpy(ends).to(values.device)]


class RewardLoss(Objective):
    """The objective."""

    def __init__(self, config: RewardModelConfig, packing: Packing, device: str | torch.device) -> None:
        self._config, self._packing, self._device = config, packing, device

    def sums(self, model: Any, rows: Sequence[Pair], use: Use) -> LossSums:
        pairs = rows or [DUMMY]
        answers = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        rewards = rewards_of(model, self._packing, answers, self._device)
        counts = [pair.chosen.response + pair.rejected.response for pair in pairs]
        tokens = torch.tensor(counts, dtype=torch.float32, device=self._device)
        margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32, device=self._device)
        sums = reward_sums(
            self._config, chosen=rewards[::2], rejected=rewards[1::2], num_tokens=tokens, margins=margins
        )
        return sums if rows else sums.weightless()

    def denominator(self, total: LossSums) -> float:
        return float(total.sums["samples"])
