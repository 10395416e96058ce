"""The experts that an engine's tokens went to, kept beside its key-value cache for as long as that.

Owns the store, a place for each place of the cache. Does not own the hook on the routers (`models/routing.py`) or which slot
holds which sample (`slots.py`).

Invariant: place j of a slot tells the experts that token j was computed with when it went into the cache, so a token that was
copied with a shared prompt, or that lives on under new weights, keeps them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rondo.models.routing import Routing, listen, no_experts, routers_of


class Recorder:
    """Of one engine over `model`, with as many slots and places as its cache. ConfigError for a model without experts."""

    def __init__(self, model: Any, *, num_slots: int, max_length: int) -> None:
        routing = Routing.of(model)
        if routing is None:
            raise no_experts(model)
        self._routing, self._layers = routing, sorted(routers_of(model))
        shape = (num_slots, max_length, len(self._layers), routing.top_k)
        device = next(model.parameters()).device
        self._kept = torch.zeros(shape, dtype=getattr(torch, routing.dtype.name), device=device)
        self._heard: dict[int, torch.Tensor] = {}
        listen(model, self._hear)

    def _hear(self, layer: int, experts: torch.Tensor) -> None:
        self._heard[layer] = experts

    def tokens(self, rows: torch.Tensor, at: torch.Tensor) -> None:
        """The forward that has just run took one token for each of these slots, at these places; int64 [n] both."""
        self._kept[rows, at] = self._taken()

    def prompts(self, slots: torch.Tensor) -> None:
        """The forward that has just run took prompts, padded on the right to one length, for these slots; int64 [m]."""
        found = self._taken().unflatten(0, (len(slots), -1))
        self._kept[slots, : found.shape[1]] = found

    def _taken(self) -> torch.Tensor:
        """What was heard since the last time, [N, layers with experts, top_k]."""
        found = torch.stack([self._heard[layer] for layer in sorted(self._heard)], 1).to(self._kept.dtype)
        self._heard.clear()
        return found

    def copy(self, source: int, target: int, length: int) -> None:
        self._kept[target, :length] = self._kept[source, :length]

    def read(self, slot: int, length: int) -> np.ndarray:
        """A copy, uint8 or int16 [length, layers, top_k]; zeros in layers without experts."""
        found = np.zeros((length, self._routing.num_layers, self._routing.top_k), self._routing.dtype)
        found[:, self._layers] = self._kept[slot, :length].cpu().numpy()
        return found
