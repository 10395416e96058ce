"""The forward of any Hugging Face decoder, through its own module and a ragged cache.

Owns the cache layers that a module writes to and reads from, the masks, and the positions of multimodal sequences. Of a model
it needs that its layers are full, sliding or linear attention, and that it takes `position_ids`, an additive mask and a `Cache`.
Slower than a fused forward, and the reference for it.

Invariant: position j of a slot's cache holds token j of its sequence. New prompts are padded on the right, so plain causal
attention is exact for them; the padding they leave in the cache is masked until real tokens replace it. Layers of linear
attention hold one state a slot, that of the newest token: for their models prompts are computed one by one, without padding.

    prompts  [slots, right-padded tokens]   causal, keys straight from the layer, written to the slots' rows
    decode   [n, 1] tokens at own positions  every row sees its own positions 0 .. p of rows 0 .. n - 1

Multimodal models take positions on four axes: text (for masks), time, height, width. A prompt brings its own; the tokens sampled
after it go on from their greatest, so all that a slot keeps is how far that is from its length.

Legend: n decode rows, m prompts, T longest prompt, K key-value heads, D head_dim, L max_length, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer, get_layer_types_and_kwargs

from rondo.models.families import family_of
from rondo.models.lora import load_published
from rondo.models.media.batch import collate, embedding, encoded_once, placeholder_ids
from rondo.models.packing import hide_placeholders
from rondo.models.rotations import check_length, longest_alike
from rondo.models.trials import differs, logits_of, trial
from rondo.roles.engines.embedded.recorder import Recorder
from rondo.roles.engines.embedded.slots import Batch, Prefill
from rondo.runtime.errors import ConfigError

KV_BLOCK = 16
"""Positions by which the attended range grows; lengths that are multiples of 16 suit every attention kernel."""

_LINEAR = "linear_attention"
_KNOWN_LAYERS = {"full_attention", "sliding_attention", _LINEAR}


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

    def wipe(self, slots: slice | int) -> None:
        if self.is_initialized:
            self.keys[slots], self.values[slots] = 0, 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self._upto or query_length), 0

    def get_seq_length(self) -> int:
        return max(self._upto - 1, 0)

    def get_max_length(self) -> int:
        return self._shape[1]


class _StateLayer(LinearAttentionLayer):
    """The states of a layer of linear attention: what its convolution still sees, and what it remembers, a row a slot.

    The module reads and writes `conv_states[0]` and `recurrent_states[0]`: nothing before a prompt, and the rows 0 .. n - 1 of
    the storage, in place, when it decodes.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self._slot: int | None = None
        self._conv: torch.Tensor | None = None
        self._memory: torch.Tensor | None = None

    def expect_prompts(self, slots: torch.Tensor) -> None:
        """The next update brings one whole prompt for this slot (int64 [1])."""
        self._slot = int(slots)
        self.conv_states[0] = self.recurrent_states[0] = None
        self.has_previous_state[0] = False

    def expect_tokens(self, rows: torch.Tensor, at: torch.Tensor, upto: int) -> None:
        """The next update brings one token for every row 0 .. n - 1."""
        assert self._conv is not None and self._memory is not None
        self._slot = None
        self.conv_states[0], self.recurrent_states[0] = self._conv[: len(rows)], self._memory[: len(rows)]
        self.has_previous_state[0] = True

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Of a prompt, [1, channels, T]: kept are its last `conv_kernel_size` positions, returned are all, padded to these."""
        size = conv_kernel_size or conv_states.shape[-1]
        if conv_states.shape[-1] < size:
            conv_states = torch.nn.functional.pad(conv_states, (size - conv_states.shape[-1], 0))
        if self._conv is None:
            self._conv = conv_states.new_zeros(self._num_slots, conv_states.shape[1], size)
        assert self._slot is not None
        self._conv[self._slot] = conv_states[0, :, -size:]
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """[1 or n, heads, key size, value size]"""
        if self._memory is None:
            self._memory = recurrent_states.new_zeros(self._num_slots, *recurrent_states.shape[1:])
        rows = slice(0, len(recurrent_states)) if self._slot is None else slice(self._slot, self._slot + 1)
        self._memory[rows] = recurrent_states
        return self._memory[rows]

    def copy(self, source: int, target: int, length: int) -> None:
        for states in (self._conv, self._memory):
            if states is not None:
                states[target] = states[source]

    def wipe(self, slots: slice | int) -> None:
        for states in (self._conv, self._memory):
            if states is not None:
                states[slots] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


def check_generation(model: Any) -> None:
    """Raises ConfigError unless prompts of different lengths, and the tokens behind them, have the logits through `HFForward`
    that the model's own forward gives them. Tried out on a few tokens."""
    device = next(model.parameters()).device
    rows = [np.arange(length) * step % 3 + 1 for length, step in ((15, 1), (8, 2))]
    ends, nothing = np.array([11, 4]), np.zeros(0, np.int64)
    with trial(model):
        alone = [logits_of(model, input_ids=torch.from_numpy(row)[None].to(device))[0] for row in rows]
        forward = HFForward(model, num_slots=len(rows), max_length=KV_BLOCK)
        prompts = tuple(Prefill(slot, row[:end]) for slot, (row, end) in enumerate(zip(rows, ends, strict=True)))
        try:
            found = [forward(Batch(nothing, nothing, prompts))]
            for at in (ends + step for step in range(4)):
                found.append(forward(Batch(np.array([row[p] for row, p in zip(rows, at, strict=True)]), at)))
        except Exception as error:  # the code of any family, over a cache that it may not know
            raise _together(
                model, f"{type(error).__name__} {' '.join(str(error).split())[:200]}".strip(". ")
            ) from error
    expected = [torch.stack([own[end - 1 + step] for own, end in zip(alone, ends, strict=True)]) for step in range(5)]
    if problem := differs(torch.cat(found).float(), torch.cat(expected)):
        raise _together(model, problem)


def _together(model: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} must compute tokens one by one as it computes them together for the embedded engine, "
        f"got: {problem}. Generate with an SGLang engine"
    )


class HFForward:
    """`Forward` for any transformers model with full, sliding or linear attention. Raises ConfigError for other layers. A
    `recorder` of the same model is told where the experts that it hears belong."""

    def __init__(
        self,
        model: Any,
        *,
        num_slots: int,
        max_length: int,
        fixed_shapes: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        named = inspect.signature(type(model).forward).parameters
        if missing := [name for name in ("past_key_values", "position_ids") if name not in named]:
            raise ConfigError(
                f"{type(model).__name__} must take past_key_values and position_ids for the embedded engine, got a model without "
                f"{' and '.join(missing)}. Generate with an SGLang engine"
            )
        kinds, options = get_layer_types_and_kwargs(config)
        if unknown := sorted(set(kinds) - _KNOWN_LAYERS):
            raise ConfigError(
                f"the layers of {type(model).__name__} must be full, sliding or linear attention for the embedded engine, "
                f"got {', '.join(unknown)}. Generate with an SGLang engine."
            )
        windows = {option["sliding_window"] for option in options if "sliding_window" in option}
        if len(windows) > 1:
            raise ConfigError(f"all sliding layers must share one window, got {sorted(windows)}. Use an SGLang engine.")
        self._model = model
        self._recorder = recorder
        self._kinds = sorted(set(kinds))
        self._window = windows.pop() if windows else 0
        check_length(type(model).__name__, longest_alike(model), max_length)
        self._length = -(-max_length // KV_BLOCK) * KV_BLOCK
        self._fixed_shapes = fixed_shapes
        self._layers: list[_RaggedLayer | _StateLayer] = [
            _StateLayer(num_slots) if kind == _LINEAR else _RaggedLayer(num_slots, self._length) for kind in kinds
        ]
        self._cache = Cache(layers=self._layers)
        self._device = next(model.parameters()).device
        self._columns = torch.arange(self._length, device=self._device)
        family = family_of(model)
        self.modalities: tuple[str, ...] = family.modalities if family is not None else ()
        self._placeholders = placeholder_ids(model)
        self.keeps_prefixes = _LINEAR not in kinds
        self._offsets = np.zeros(num_slots, np.float32)  # multimodal: from a slot's length to its next position

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().weight.shape[0])

    def __call__(self, batch: Batch) -> torch.Tensor:
        parts = []
        if len(batch.tokens):
            parts.append(self._decode(batch.tokens, batch.positions))
        if batch.prompts and self.keeps_prefixes:
            parts.append(self._prefill(batch.prompts))
        else:
            parts += [self._prefill((prompt,)) for prompt in batch.prompts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, source: int, target: int, length: int) -> None:
        self._offsets[target] = self._offsets[source]
        for layer in self._layers:
            layer.copy(source, target, length)
        if self._recorder is not None:
            self._recorder.copy(source, target, length)

    def clear(self, slot: int | None = None) -> None:
        for layer in self._layers:
            layer.wipe(slice(None) if slot is None else slot)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_published(self._model, tensors)

    held = False

    def refresh(self) -> None:
        """The module's own parameters are all there is."""

    def _decode(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        at = torch.from_numpy(positions).to(self._device)
        rows = torch.arange(len(tokens), device=self._device)
        upto = self._length if self._fixed_shapes else (int(positions.max()) // KV_BLOCK + 1) * KV_BLOCK
        for layer in self._layers:
            layer.expect_tokens(rows, at, upto)
        masks = {kind: None if kind == _LINEAR else self._mask(kind, at, upto) for kind in self._kinds}
        position_ids = at[:, None]
        if self.modalities:
            axes = np.tile(positions + self._offsets[: len(positions)], (4, 1)).astype(np.float32)
            axes[0] = positions
            position_ids = torch.from_numpy(axes).to(self._device)[..., None]
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(self._device)[:, None],
            position_ids=position_ids,
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            past_key_values=self._cache,
            use_cache=True,
        )
        if self._recorder is not None:
            self._recorder.tokens(rows, at)
        return output.logits[:, -1]

    def _prefill(self, prompts: tuple[Prefill, ...]) -> torch.Tensor:
        lengths = np.array([prompt.tokens.size for prompt in prompts])
        ids = np.zeros((len(prompts), int(lengths.max())), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: prompt.tokens.size] = prompt.tokens
        slots = torch.tensor([prompt.slot for prompt in prompts], device=self._device)
        for layer in self._layers:
            layer.expect_prompts(slots)
        position_ids = self._columns[None, : ids.shape[1]].expand(len(prompts), -1)
        if self.modalities:
            position_ids = torch.from_numpy(self._axes(prompts, ids.shape[1])).to(self._device)
        media = collate(
            self._model, [prompt.media for prompt in prompts if prompt.media is not None], device=self._device
        )
        features = np.zeros(ids.shape, bool)  # a placeholder that was sampled stands for no medium
        for row, prompt in zip(features, prompts, strict=True):
            for at, part in prompt.media.placed if prompt.media is not None else ():
                row[at : at + part.positions.shape[1]] = True
        hidden = hide_placeholders(ids, features, self._placeholders)
        embedded = None if hidden is None else torch.from_numpy(ids).to(self._device)
        heads = self._heads_of(torch.from_numpy(lengths - 1).to(self._device))
        with heads, encoded_once(self._model, media), embedding(self._model, embedded):
            output = self._model(
                input_ids=torch.from_numpy(ids if hidden is None else hidden).to(self._device),
                position_ids=position_ids,
                past_key_values=self._cache,
                use_cache=True,
                **media.arguments,
            )
        if self._recorder is not None:
            self._recorder.prompts(slots)
        return output.logits[:, 0]

    def _axes(self, prompts: tuple[Prefill, ...], width: int) -> np.ndarray:
        """float32 [4, prompts, width]; notes how far the positions of each slot run ahead of its length."""
        axes = np.tile(np.arange(width, dtype=np.float32), (4, len(prompts), 1))
        for row, prompt in enumerate(prompts):
            self._offsets[prompt.slot] = 0.0
            if prompt.media is not None:
                length = prompt.media.positions.shape[1]
                offset = prompt.media.positions.max() + 1 - length
                axes[1:, row, :length] = prompt.media.positions
                axes[1:, row, length:] += offset
                self._offsets[prompt.slot] = offset
        return axes

    @contextmanager
    def _heads_of(self, ends: torch.Tensor) -> Iterator[None]:
        """While the body runs, only the position at which each prompt ends (int64 [m]) reaches the output head."""

        def last(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            rows = torch.arange(len(ends), device=ends.device)
            return (args[0][rows, ends][:, None],)

        handle = self._model.get_output_embeddings().register_forward_pre_hook(last)
        try:
            yield
        finally:
            handle.remove()

    def _mask(self, kind: str, at: torch.Tensor, upto: int) -> torch.Tensor:
        """Additive, [n, 1, 1, upto]: 0 where a row's token may look, -inf elsewhere."""
        columns = self._columns[:upto]
        seen = columns <= at[:, None]
        if kind == "sliding_attention":
            seen &= columns > at[:, None] - self._window
        dtype = next(layer.keys.dtype for layer in self._layers if isinstance(layer, _RaggedLayer))
        mask = torch.full(seen.shape, -torch.inf, dtype=dtype, device=self._device).masked_fill_(seen, 0.0)
        return mask[:, None, None]
