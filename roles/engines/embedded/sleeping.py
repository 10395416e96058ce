"""An engine's forward that shares a process with the trainer: it gives its memory away while nothing is generated and takes it
again, and it may compute with the trainer's own tensors.

Owns what is released and when it is made again, and the check before every forward that lent tensors are the version that the
engine says. Does not own when to sleep (`replica.py`, where generation and training take turns in one process), where weights
come from, or what lent tensors are (`shared_weights.py`).

    awake --sleep (nothing in flight)--> asleep: no key-value cache, no fused weights, no weights of its own --load--> awake

The base of adapters is not published again: what the engine has of its own of it lies in host memory meanwhile.

Invariant: a forward that sleeps, or whose lent tensors are another version, is held: nothing is computed until weights are
loaded. What it computes after a sleep is what it would have computed without, since the cache of what is in flight is empty at
both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rondo.models.at_rest import AtRest
from rondo.models.lora import adapted, load_published
from rondo.roles.engines.embedded.shared_weights import Flip, Lent
from rondo.roles.engines.embedded.slots import Batch, Forward
from rondo.runtime.errors import CorruptData


class Sleeper:
    """`Forward` around the one that `make` builds over `model`. `lent`: the model's weights are somebody else's, who says which
    version they are; they stay while it sleeps, and it flips by taking over what has become of them. `shares`: those of its base
    alone are somebody else's."""

    def __init__(
        self, make: Callable[[], Forward], model: Any, lent: Lent | None = None, *, shares: bool = False
    ) -> None:
        self._make = make
        self._adapts, self._shares = bool(adapted(model)), shares
        self._at_rest = AtRest()
        self._model = model
        self._lent = lent
        self._version: int | None = None
        self._shapes = [(parameter, parameter.shape) for parameter in model.parameters()]
        self._forward: Forward | None = make()
        self.vocab_size = self._forward.vocab_size
        self.modalities = self._forward.modalities
        self.keeps_prefixes = self._forward.keeps_prefixes

    @property
    def held(self) -> bool:
        """Whether it sleeps, or the lent tensors are not the version that it is for."""
        elsewhere = self._lent is not None and (self._version is None or self._lent.version != self._version)
        return self._forward is None or elsewhere

    def sleep(self) -> None:
        """Release everything. What was in the cache is gone."""
        self._forward = None
        if self._adapts and not self._shares:
            self._at_rest.leave(parameter for parameter, _ in self._shapes if parameter.is_cuda)
        for parameter, _ in self._shapes if self._lent is None and not self._adapts else ():
            parameter.data = parameter.data.new_empty(0)

    def __call__(self, batch: Batch) -> torch.Tensor:
        if self._lent is not None and self.held:
            raise CorruptData(
                f"the lent weights must be policy version {self._version} while the engine samples, got {self._lent.version}. "
                "This is a fault in rondo: the engine was not held while they changed."
            )
        return self._awake(batch)

    def copy(self, source: int, target: int, length: int) -> None:
        self._awake.copy(source, target, length)

    def clear(self, slot: int | None = None) -> None:
        if self._forward is not None:
            self._forward.clear(slot)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Lent tensors are taken over where they still are the version of a `Flip`; else it stays held, until the next flip."""
        if self._lent is not None:
            if not isinstance(tensors, Flip):
                raise AssertionError("an engine that generates with the trainer's tensors must get no others")
            self._version = None
            if self._lent.version == tensors.version:
                self.refresh()
            return
        if self._forward is not None:
            self._forward.load(tensors)
            return
        self._at_rest.come_back()
        for parameter, shape in self._shapes if not self._adapts else ():
            parameter.data = parameter.data.new_empty(shape)
        load_published(self._model, tensors)
        self._forward = self._make()

    def refresh(self) -> None:
        """Also wakes one whose weights are somebody else's."""
        if self._forward is None:
            self._forward = self._make()
        else:
            self._forward.refresh()
        self._version = None if self._lent is None else self._lent.version

    @property
    def _awake(self) -> Forward:
        if self._forward is None:
            raise AssertionError("a forward that sleeps must not be called before weights are loaded")
        return self._forward
