"""The value loss as an objective of a backend: rows of the bus into values, and these into undivided sums.

Owns which rows it takes, and scoring: the values that advantages are made of come from the same model. Does not own the formula
(`roles/algorithms/value_loss.py`), returns (`roles/algorithms/values.py`), or the steps (`backend.py`).

    backend = open_critic(config, path, world_size=1, device="cpu")
    backend.objective.score(backend.model, sequences) -> [values float32 [R] of each]
    [backend.accumulate(step, rows, spans, last=...) ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import Row
from rondo.comm.ring.spans import num_samples
from rondo.models.load import load_config
from rondo.models.logprobs import response_values
from rondo.models.media.inputs import MediaInputs
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.algorithms.value_loss import value_sums
from rondo.roles.config import JobConfig, TrainConfig
from rondo.roles.forward import media_of
from rondo.roles.training.backend import Backend, Objective, Use, make_ready, open_model
from rondo.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One row as the value loss needs it; T tokens, R of them response."""

    tokens: np.ndarray  # int32 [T]
    returns: np.ndarray  # float32 [R]; NaN: none
    old_values: np.ndarray  # float32 [R], those that the returns were made with
    media: MediaInputs | None = None

    @classmethod
    def of(cls, row: Row) -> ValueRow:
        return cls(row.array("tokens"), row.array("returns"), row.array("values"), media_of(row))


def open_critic(
    config: JobConfig, path: str, policy_path: str, *, world_size: int, device: str
) -> Backend[ValueObjective]:
    """The critic of a job, with the weights at `path`, for the policy at `policy_path` (collective)."""
    assert config.critic is not None
    if config.critic.path is not None:
        own, policy = (load_config(each).get_text_config().vocab_size for each in (path, policy_path))
        if own < policy:
            raise ConfigError(
                f"critic.path must know the tokens of the policy, {policy}, got a model of {own}. Name one of the same family"
            )
    mesh = Mesh.open(config.critic.mesh, world_size, device)
    own = config.model_copy(update={"train": train_of_critic(config)})
    return critic_of(config, *open_model(own, path, mesh, device=device, values=True), mesh, device)


def train_of_critic(config: JobConfig) -> TrainConfig:
    """How a critic's model computes and what of it is trained: towers that the policy leaves as they are stay so here; all else
    is, or its adapters and its head."""
    assert config.critic is not None
    frozen = tuple(part for part in config.train.freeze if part != "language")
    own = {"freeze": frozen, "freeze_parameters": (), "train_parameters": (), "lora": config.critic.lora}
    return config.train.model_copy(update=own)


def critic_of(config: JobConfig, model: Any, packing: Packing, mesh: Mesh, device: str) -> Backend[ValueObjective]:
    """The critic of a job with a `model` that has a value head and is cut over `mesh` (collective)."""
    critic, train = config.critic, config.train
    assert critic is not None
    return Backend(
        make_ready(model, train_of_critic(config)), ValueObjective(packing, device, clip=critic.value_clip), critic,
        num_steps=config.num_steps, mesh=mesh, mini_batches=train.num_mini_batches, passes=config.critic_passes,
        offload=train.offload_optimizer, scales=train.dtype == "float16",
    )  # fmt: skip


class ValueObjective(Objective):
    """The value loss of a job. clip: how far a value may move from the one before."""

    def __init__(self, packing: Packing, device: str, *, clip: float | None) -> None:
        self._packing, self._device, self._clip = packing, device, clip

    def score(self, model: Any, rows: Sequence[Packable], *, behind: bool = False) -> list[np.ndarray]:
        """Values of the response tokens of each row, float32 [R] (collective); no rows: a dummy. behind: [R + 1], the last one of
        the state behind the last token."""
        with torch.no_grad():
            flat = self._values(model, rows or [_dummy()], behind=behind).cpu().numpy()
        return np.split(flat, np.cumsum([row.response + behind for row in rows]))[: len(rows)]

    def sums(self, model: Any, rows: Sequence[ValueRow], use: Use) -> LossSums:
        chosen = rows or [ValueRow(_dummy().tokens, np.zeros(1, np.float32), np.zeros(1, np.float32))]
        packed = [Packable(row.tokens, len(row.returns), row.media) for row in chosen]
        old, returns = (
            torch.from_numpy(np.concatenate(arrays)).to(self._device)
            for arrays in ([row.old_values for row in chosen], [row.returns for row in chosen])
        )
        values = self._values(model, packed)
        sums = value_sums(values, old_values=old, returns=returns, num_samples=num_samples(use.spans), clip=self._clip)
        return sums if rows else sums.weightless()

    def denominator(self, total: LossSums) -> float:
        return max(1.0, float(total.sums["tokens"]))

    def _values(self, model: Any, rows: Sequence[Packable], *, behind: bool = False) -> torch.Tensor:
        return response_values(model, self._packing.pack(rows, train=True, behind=behind).to(self._device))


def _dummy() -> Packable:
    return Packable(np.zeros(2, np.int32), 1)
