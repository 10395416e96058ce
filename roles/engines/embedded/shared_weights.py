"""The trainer's own tensors, lent to the engine of the same process: no second copy of the weights, and nothing to publish to it.
With adapters the base alone is lent, which never moves: the engine has adapters of its own, and gets them as published.

Owns which policy version the lent tensors are, as the trainer says it. Does not own the check before every forward that they are
still what the engine calls them (`sleeping.py`), the tensors (`roles/training/backend.py`), the moment of a flip (`embedded.py`)
or its proof to the coordinator (`replica.py`).

    trainer, compute thread   | round | round | optimizer                |        | round ...
    lent.version              3 ............... None .................... 4 .......
    engine, compute thread    tokens of version 3 | held                  | flip to 4 | tokens of version 4

Invariant: no token is sampled while the tensors are between two versions, or are another one than the engine says. Training and
generation share one thread, so an optimizer step is never seen half-done; from its beginning until the version is committed
the engine is held, and then flips between two decode steps.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import torch

from rondo.models.lora import adapted
from rondo.models.names import adapter_tensors


class Flip(dict[str, torch.Tensor]):
    """To the lent tensors as they are, so there is nothing in it; `version` says which they must be."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version


class Lent:
    """A model over the trainer's parameters, but for adapters. `model` is a module of its own: modes, wrappers and hooks of the
    trainer's do not reach it, only its parameters are the same objects."""

    def __init__(self, model: Any) -> None:
        """model: the trainer's, whole and before anything is wrapped or sharded."""
        adapters = {id(each) for each in adapter_tensors(model).values()}
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in adapters})
        for product in adapted(self.model).values():
            for part in (product.lora_A, product.lora_B):
                part.to(self.model.dtype)
        self.version: int | None = None
        self._changed = asyncio.Event()

    def moves(self) -> None:
        """On the compute thread: the tensors stop being a version; the engine is held until they are one again."""
        self.version = None

    def holds(self, version: int) -> None:
        """On the event loop: the tensors are this committed version."""
        self.version = version
        self._changed.set()

    async def newer_than(self, version: int) -> Flip:
        """Waits until the tensors are a newer version: what `update_weights` takes then."""
        while self.version is None or self.version <= version:
            self._changed.clear()
            await self._changed.wait()
        return Flip(self.version)
