"""A value head in the place of a causal LM's output layer: one number for the state behind every token.

Owns the layer, how it is put into a model of any family, and its weights: drawn anew, or the `score.weight` of a folder, as
models for sequence classification with one label have it (reward models), or its name in memory, as critics had it; and which
models can be written as one. Does not own the forward (`logprobs.py`), the loss, or names on disk (`names.py`).

    load_model(path, cut=lambda model: (give_value_head(model), shard(model, mesh)))

Invariant: the model is whole without its output layer: nothing of that is read, held or trained, and embeddings that were tied to
it are trained alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSequenceClassification

from rondo.models.names import ADAPTER, HEAD, SCORE, own_slices
from rondo.runtime.errors import ConfigError

ENDS = "scores_end_of_sequence"
"""Of a folder's config.json: an answer is scored at the end of sequence, and not at the end of what a chat template writes."""
_NAME = "value"
_STD, _SEED = 0.02, 0x5EED


class ValueHead(nn.Module):
    """hidden states [..., H] -> values float32 [..., 1]. Without a bias: returns have no scale of their own that the first steps
    would not find. whole: it lies so on every rank, and computes in float32."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device, whole: bool = False) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1, hidden_size, dtype=torch.float32 if whole else dtype, device=device))
        self.whole = whole

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.value.float())


def give_value_head(model: Any, *, whole: bool = False) -> None:
    """In place; for a model without weights yet. ConfigError for one without an output layer. whole: as what is trained beside
    adapters is, on every rank and in float32, whatever the model's."""
    before = model.get_output_embeddings()
    if before is None:
        raise ConfigError(f"{type(model).__name__} must have an output layer, got none. Choose a causal LM")
    at = next(name for name, module in model.named_modules() if module is before)
    model.set_output_embeddings(
        ValueHead(before.weight.shape[1], dtype=before.weight.dtype, device=before.weight.device, whole=whole)
    )
    for held in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, held, None) or {}
        setattr(model, held, {one: other for one, other in tied.items() if not one.startswith(f"{at}.")})
    setattr(model, HEAD, f"{at}.{_NAME}")


def value_head_of(model: Any) -> str | None:
    """Where its value head is; None for a model without one."""
    return next((name for name, module in model.named_modules() if isinstance(module, ValueHead)), None)


def whole_heads(model: Any) -> set[nn.Parameter]:
    """Its value head, if it has one that is whole on every rank."""
    return {module.value for module in model.modules() if isinstance(module, ValueHead) and module.whole}


def check_scores(model: Any) -> None:
    """ConfigError where transformers has no model for sequence classification that is the trunk of `model`, which has a value
    head, and one layer `score`."""
    auto, config = AutoModelForSequenceClassification, copy.deepcopy(model.config)
    names: set[str] = set()
    if type(config) in auto._model_mapping:
        with torch.device("meta"):
            names = set(auto.from_config(config).state_dict())
    own = {name for name in model.state_dict() if not ADAPTER.search(name)}
    if names != own - {getattr(model, HEAD)} | {SCORE}:
        raise ConfigError(
            f"transformers must have {type(model).__name__.removeprefix('FSDP')} as a model for sequence classification, of the "
            f"same trunk and {SCORE}, got none. Choose a text model, or one of Qwen3.5"
        )


def config_of_scores(config: Any, tokenizer: Any) -> Any:
    """The config of a folder with this tokenizer, in which transformers finds one label, and where an answer ends."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    setattr(config, ENDS, True)
    if type(config) in (known := AutoModelForSequenceClassification._model_mapping):  # a critic may be of any family
        config.architectures = [known[type(config)].__name__]
    # It scores the last token that is no padding: an end of sequence that pads, too, would not be seen.
    text, pad = config.get_text_config(), tokenizer.pad_token_id
    text.pad_token_id = None if pad == tokenizer.eos_token_id or (pad or 0) >= text.vocab_size else pad
    return config


def head_parts(model: Any, sources: Mapping[str, Any], unknown: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in memory, this rank's part) of the value head, if the model has one, out of the files of a folder, or drawn. What
    these have for an output layer is `unknown` no more: nobody misses it."""
    at = value_head_of(model)
    if at is None:
        return
    unknown -= {name for name in unknown if name.startswith((f"{at}.", "score."))}
    name = f"{at}.{_NAME}"
    place = model.get_parameter(name)
    given = next((sources[each] for each in (SCORE, name) if each in sources), None)
    if given is not None:
        whole = given[...]
        if whole.shape != place.shape:
            raise ConfigError(
                f"{SCORE} of a folder must have one label, {list(place.shape)}, got {list(whole.shape)}. Name a folder of a "
                "model that scores, or one without it"
            )
    else:
        whole = torch.randn(place.shape, generator=torch.Generator().manual_seed(_SEED)) * _STD
    own = own_slices(place, whole)
    yield name, (whole[own] if own else whole).to(place.dtype)
