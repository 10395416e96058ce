"""An engine's forward that gives its memory to the trainer while nothing is generated, and takes it again.

Owns what is released and when it is made again. Does not own when to sleep (`replica.py`, where generation and training take
turns in one process) or where the weights come from.

    awake --sleep (nothing in flight)--> asleep: no key-value cache, no fused weights, no weights of its own --load--> awake

Invariant: a forward that sleeps is held: nothing is computed until weights are loaded. What it computes then is what it would
have computed without sleeping, since the cache of what is in flight is empty at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rondo.models.names import load_disk_tensors
from rondo.roles.engines.embedded.slots import Batch, Forward


class Sleeper:
    """`Forward` around the one that `make` builds over `model`. `owns`: the model's weights are released too; else they are
    somebody else's and stay."""

    def __init__(self, make: Callable[[], Forward], model: Any, *, owns: bool) -> None:
        self._make = make
        self._model = model
        self._owns = owns
        self._shapes = [(parameter, parameter.shape) for parameter in model.parameters()]
        self._forward: Forward | None = make()
        self.vocab_size = self._forward.vocab_size
        self.modalities = self._forward.modalities
        self.keeps_prefixes = self._forward.keeps_prefixes

    @property
    def held(self) -> bool:
        """Whether it sleeps."""
        return self._forward is None

    def sleep(self) -> None:
        """Release everything. What was in the cache is gone."""
        self._forward = None
        for parameter, _ in self._shapes if self._owns else ():
            parameter.data = parameter.data.new_empty(0)

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self._awake(batch)

    def copy(self, source: int, target: int, length: int) -> None:
        self._awake.copy(source, target, length)

    def clear(self, slot: int | None = None) -> None:
        if self._forward is not None:
            self._forward.clear(slot)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._forward is not None:
            self._forward.load(tensors)
            return
        for parameter, shape in self._shapes:
            parameter.data = parameter.data.new_empty(shape)
        load_disk_tensors(self._model, tensors)
        self._forward = self._make()

    def refresh(self) -> None:
        """Also wakes one whose weights are somebody else's."""
        if self._forward is None:
            self._forward = self._make()
        else:
            self._forward.refresh()

    @property
    def _awake(self) -> Forward:
        if self._forward is None:
            raise AssertionError("a forward that sleeps must not be called before weights are loaded")
        return self._forward
