"""Pairs of answers as the objective of a reward model, which gives a whole answer one number: that of a value head at its end.

Owns where an answer is scored: in the state behind its last token, as transformers' models for sequence classification do it.
Does not own what is made of a row (`preference.py`), the formula (`roles/algorithms/preference.py`), the head and its folder
(`models/value_head.py`), batches and steps (`supervised.py`).

    backend = open_supervised(config, path, 100, world_size=1, device="cpu")
    Learning(backend, pair_encoder(...), ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rondo.models.logprobs import response_values
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.algorithms.preference import reward_sums
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import RewardModelConfig
from rondo.roles.training.backend import Objective, Use
from rondo.roles.training.preference import DUMMY, Pair


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
