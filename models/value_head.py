"""A value head in the place of a causal LM's output layer: one number for the state behind every token.

Owns the layer, how it is put into a model of any family, and its weights: drawn anew, or the `score.weight` of a folder, as
models for sequence classification with one label have it (reward models). Does not own the forward (`logprobs.py`) or the loss.

    load_model(path, cut=lambda model: (give_value_head(model), shard(model, mesh)))

Invariant: the model is whole without its output layer: nothing of that is read, held or trained, and embeddings that were tied to
it are trained alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rondo.models.names import own_slices
from rondo.runtime.errors import ConfigError

_NAME, _SCORE = "value", "score.weight"
_STD, _SEED = 0.02, 0x5EED


class ValueHead(nn.Module):
    """hidden states [..., H] -> values float32 [..., 1]. Without a bias: returns have no scale of their own that the first steps
    would not find."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.value.float())


def give_value_head(model: Any) -> None:
    """In place; for a model without weights yet. ConfigError for one without an output layer."""
    before = model.get_output_embeddings()
    if before is None:
        raise ConfigError(f"{type(model).__name__} must have an output layer, got none. Choose a causal LM")
    at = next(name for name, module in model.named_modules() if module is before)
    model.set_output_embeddings(
        ValueHead(before.weight.shape[1], dtype=before.weight.dtype, device=before.weight.device)
    )
    for held in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, held, None) or {}
        setattr(model, held, {one: other for one, other in tied.items() if not one.startswith(f"{at}.")})


def value_head_of(model: Any) -> str | None:
    """Where its value head is; None for a model without one."""
    return next((name for name, module in model.named_modules() if isinstance(module, ValueHead)), None)


def head_parts(model: Any, sources: Mapping[str, Any], unknown: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in memory, this rank's part) of the value head, if the model has one, out of the files of a folder, or drawn. What
    these have for an output layer is `unknown` no more: nobody misses it."""
    at = value_head_of(model)
    if at is None:
        return
    unknown -= {name for name in unknown if name.startswith((f"{at}.", "score."))}
    name = f"{at}.{_NAME}"
    place = model.get_parameter(name)
    if _SCORE in sources:
        whole = sources[_SCORE][...]
        if whole.shape != place.shape:
            raise ConfigError(
                f"{_SCORE} of critic.path must have one label, {list(place.shape)}, got {list(whole.shape)}. Name a folder of a "
                "model that scores, or one without it"
            )
    else:
        whole = torch.randn(place.shape, generator=torch.Generator().manual_seed(_SEED)) * _STD
    own = own_slices(place, whole)
    yield name, (whole[own] if own else whole).to(place.dtype)
