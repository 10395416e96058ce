"""The forward of any Hugging Face decoder, through its own module and a ragged cache.

Owns the cache layers that a module writes to and reads from, and the masks. Knows no family: what it needs from a model is
that its layers are full or sliding attention over keys and values, and that it takes `position_ids`, a 4-D additive mask
and a `Cache`. Slower than a fused forward, and the reference for it.

Invariant: position j of a slot's cache holds token j of its sequence. New prompts are padded on the right, so plain causal
attention is exact for them; the padding they leave in the cache is masked until real tokens replace it.

    prompts  [slots, right-padded tokens]   causal, keys straight from the layer, written to the slots' rows
    decode   [n, 1] tokens at own positions  every row sees its own positions 0 .. p of rows 0 .. n - 1

Legend: n decode rows, m prompts, T longest prompt, K key-value heads, D head_dim, L max_length, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from rondo.models.names import load_disk_tensors
from rondo.roles.rollout.slots import Batch
from rondo.runtime.errors import ConfigError

KV_BLOCK = 16
"""Positions by which the attended range grows; lengths that are multiples of 16 suit every attention kernel."""

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class _RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, [num_slots, K, L, D] each, allocated when the first prompt shows their shape."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()
        self._shape = (num_slots, max_length)
        self._slots: torch.Tensor | None = None
        self._at: torch.Tensor | None = None
        self._upto = 0

    def expect_prompts(self, slots: torch.Tensor) -> None:
        """The next update brings whole prompts, right-padded, for these slots (int64 [m])."""
        self._slots, self._upto = slots, 0

    def expect_tokens(self, rows: torch.Tensor, at: torch.Tensor, upto: int) -> None:
        """The next update brings one token for every row 0 .. n - 1 at positions `at`; attention looks at `upto`."""
        self._slots, self._rows, self._at, self._upto = None, rows, at, upto

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        num_slots, length = self._shape
        self.keys = key_states.new_zeros(num_slots, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(num_slots, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._slots is not None:
            length = key_states.shape[2]
            self.keys[:, :, :length].index_copy_(0, self._slots, key_states)
            self.values[:, :, :length].index_copy_(0, self._slots, value_states)
            return key_states, value_states
        self.keys[self._rows, :, self._at] = key_states[:, :, 0]
        self.values[self._rows, :, self._at] = value_states[:, :, 0]
        num_rows = len(key_states)
        return self.keys[:num_rows, :, : self._upto], self.values[:num_rows, :, : self._upto]

    def copy(self, source: int, target: int, length: int) -> None:
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self._upto or query_length), 0

    def get_seq_length(self) -> int:
        return max(self._upto - 1, 0)

    def get_max_length(self) -> int:
        return self._shape[1]


class HFForward:
    """`Forward` for any transformers causal LM with full or sliding attention. Raises ConfigError for other layers."""

    def __init__(self, model: Any, *, num_slots: int, max_length: int, fixed_shapes: bool = False) -> None:
        config = model.config.get_text_config(decoder=True)
        kinds, options = get_layer_types_and_kwargs(config)
        if unknown := sorted(set(kinds) - _KNOWN_LAYERS):
            raise ConfigError(
                f"the layers of {type(model).__name__} must be full or sliding attention for the embedded engine, "
                f"got {', '.join(unknown)}. Generate with an SGLang engine."
            )
        windows = {option["sliding_window"] for option in options if "sliding_window" in option}
        if len(windows) > 1:
            raise ConfigError(f"all sliding layers must share one window, got {sorted(windows)}. Use an SGLang engine.")
        self._model = model
        self._kinds = sorted(set(kinds))
        self._window = windows.pop() if windows else 0
        self._length = -(-max_length // KV_BLOCK) * KV_BLOCK
        self._fixed_shapes = fixed_shapes
        self._layers = [_RaggedLayer(num_slots, self._length) for _ in kinds]
        self._cache = Cache(layers=self._layers)
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._columns = torch.arange(self._length, device=self._device)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().weight.shape[0])

    def __call__(self, batch: Batch) -> torch.Tensor:
        parts = []
        if len(batch.tokens):
            parts.append(self._decode(batch.tokens, batch.positions))
        if batch.prompts:
            parts.append(self._prefill(batch.prompts))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer.copy(source, target, length)

    def clear(self) -> None:
        for layer in self._layers:
            layer.reset()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_disk_tensors(self._model, tensors)

    def _decode(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        at = torch.from_numpy(positions).to(self._device)
        rows = torch.arange(len(tokens), device=self._device)
        upto = self._length if self._fixed_shapes else (int(positions.max()) // KV_BLOCK + 1) * KV_BLOCK
        for layer in self._layers:
            layer.expect_tokens(rows, at, upto)
        masks = {kind: self._mask(kind, at, upto) for kind in self._kinds}
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(self._device)[:, None],
            position_ids=at[:, None],
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _prefill(self, prompts: tuple[tuple[int, np.ndarray], ...]) -> torch.Tensor:
        lengths = np.array([tokens.size for _, tokens in prompts])
        ids = np.zeros((len(prompts), int(lengths.max())), np.int64)
        for row, (_, tokens) in zip(ids, prompts, strict=True):
            row[: tokens.size] = tokens
        slots = torch.tensor([slot for slot, _ in prompts], device=self._device)
        for layer in self._layers:
            layer.expect_prompts(slots)
        # Only the positions at which some prompt ends reach the output head.
        ends, end_of = np.unique(lengths - 1, return_inverse=True)
        output = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            position_ids=self._columns[None, : ids.shape[1]].expand(len(prompts), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(ends).to(self._device),
        )
        rows = torch.arange(len(prompts), device=self._device)
        return output.logits[rows, torch.from_numpy(end_of).to(self._device)]

    def _mask(self, kind: str, at: torch.Tensor, upto: int) -> torch.Tensor:
        """Additive, [n, 1, 1, upto]: 0 where a row's token may look, -inf elsewhere."""
        columns = self._columns[:upto]
        seen = columns <= at[:, None]
        if kind == "sliding_attention":
            seen &= columns > at[:, None] - self._window
        mask = torch.full(seen.shape, -torch.inf, dtype=self._dtype, device=self._device).masked_fill_(seen, 0.0)
        return mask[:, None, None]
