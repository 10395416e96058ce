"""The tokens of a prompt once for all of its samples: a flat batch, and the attention that reads it.

Owns where each token lies in a flat batch, which keys each query sees, and the attention function that does it for any model of
transformers whose layers are causal attention, full or in a window. Does not own what else a batch holds (`packing.py`), nor
what a GPU's kernels are told of it (`kernels.py`).

The samples of a prompt group begin alike, and what a token's layers make of it depends on the tokens before it alone. So a prompt
is computed once, and its keys and values serve all of its samples; nothing is padded but inside attention. The gradient is the
same sum in another order.

    prompt a with samples A B C, prompt d with D      flat:  aaaa dd AAAAA BBB CCC DDDD
                                                              |_______________|
                                                       queries BBB see keys aaaa BBB

With "sdpa" attention goes by blocks: segments of about one length, each a row, padded to the longest of its block. A query sees
the prompt before its segment, and its own segment up to itself. A kernel takes the batch whole, each prompt before its answers.

Invariant: each token is in one segment, and a block's segments lie behind each other in the flat batch. A layer computes as it
always does where a batch has no `SharedPrompts`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from rondo.models.families import family_of
from rondo.models.kernels import KERNELS, Part, Run
from rondo.models.trials import Failed, differs, logits_of, trial

NAME = "rondo_shared_prompts"
"""Of this attention, among those of transformers."""
_ARGUMENT = "shared_prompts"
_CLASSES_PER_OCTAVE = 2
"""Segments share a block when their lengths, and those of their prompts, are of one class: within 41 % of each other."""
_MOST_SCORES = 1 << 26
"""Most queries times keys of a block with a mask, which has as many bytes where the rows' prompts differ in length."""
_STEP = 512
"""Fewest queries that are taken at a time in a window."""
_REFUSED = ("softcap", "position_bias", "s_aux")
_applied: ContextVar[SharedPrompts | None] = ContextVar("shared_prompts", default=None)
_apart: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Any, set[Call]] = WeakKeyDictionary()


class OtherAttention(Failed):
    """A layer attends in a way that flat batches do not have. Met while a model is tried out, which then gets rows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` tokens that follow each other, all of them behind the segment `prompt` (its index), or behind nothing."""

    length: int
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What the layers get in place of a mask whose queries see so many tokens, their own included."""

    tokens: int


@dataclass(slots=True)
class Block:
    """B segments as rows of Q queries that see K keys. `start` and `stop` are their tokens in the flat batch."""

    start: int
    stop: int
    rows: int
    queries: torch.Tensor | None = None  # int64 [B * Q], token of each query; None: those from start to stop
    keys: torch.Tensor | None = None  # int64 [B * K], token of each key; None: the queries
    kept: torch.Tensor | None = None  # int64 [stop - start], query of each token; None: each query is one
    mask: torch.Tensor | None = None  # bool [B or 1, 1, Q, K]; None: causal
    before: torch.Tensor | None = None  # int64 [B or 1], of the prompt that the rows of `mask` see
    _biases: dict[tuple[torch.dtype, int, int | None], torch.Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Block:
        queries, keys, kept, mask, before = (
            None if t is None else t.to(device) for t in (self.queries, self.keys, self.kept, self.mask, self.before)
        )
        return Block(self.start, self.stop, self.rows, queries, keys, kept, mask, before)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """query [N, heads, D], key [N, key heads, D] and value [N, key heads, value D] of all tokens -> [stop - start, heads,
        value D]."""
        window = how.pop("window")
        q = self._rows_of(query, self.queries)
        k, v = (self._rows_of(x, self.queries if self.keys is None else self.keys) for x in (key, value))
        if self.mask is not None:
            out = self._through_mask(q, k, v, window, **how)
        elif window is None:
            out = sdpa_attention_forward(module, q, k, v, None, is_causal=True, **how)[0].flatten(0, 1)
        else:
            out = _near(module, q, k, v, window, **how)
        return out if self.kept is None else F.embedding(self.kept, out.flatten(1)).view(-1, *out.shape[1:])

    def _rows_of(self, x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """[B, heads, length, D]. An embedding's backward adds rows up in a loop of its own, which index_select's does not."""
        found = x[self.start : self.stop] if index is None else F.embedding(index, x.flatten(1)).view(-1, *x.shape[1:])
        return found.unflatten(0, (self.rows, -1)).transpose(1, 2)

    def _through_mask(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        *,
        scaling: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """[B * Q, heads, value D]. Heads that share keys are further queries of one head, so that no key is copied for them."""
        num_rows, num_heads, length, _ = q.shape
        shared = num_heads // k.shape[1]
        folded = q.unflatten(1, (-1, shared)).transpose(2, 3).flatten(2, 3)
        out = F.scaled_dot_product_attention(
            folded, k, v, attn_mask=self._bias(q.dtype, shared, window), dropout_p=dropout, scale=scaling
        )
        return out.unflatten(2, (length, shared)).transpose(1, 2).reshape(num_rows * length, num_heads, v.shape[-1])

    def _bias(self, dtype: torch.dtype, shared: int, window: int | None) -> torch.Tensor:
        """What to add to the scores: 0, or minus infinity; made once for all layers."""
        assert self.mask is not None and self.before is not None
        if (dtype, shared, window) not in self._biases:
            seen = self.mask
            if window is not None:
                width, depth = seen.shape[2], seen.shape[3] - seen.shape[2]
                of_own = self.before[:, None] + torch.arange(width, device=seen.device)
                of_keys = torch.cat([torch.arange(depth, device=seen.device).expand(len(of_own), -1), of_own], 1)
                seen = seen & (of_own[:, None, :, None] - of_keys[:, None, None] < window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)
            self._biases[dtype, shared, window] = bias.repeat_interleave(shared, dim=2)
        return self._biases[dtype, shared, window]


def _near(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, **how: Any
) -> torch.Tensor:
    """Rows of queries [B, heads, T, D] of which each sees the last `window` keys of its row up to its own -> [B * T, heads,
    value D]. A part of them at a time, with the keys that it can see: no mask is as large as T times T."""
    length, step, parts = query.shape[2], max(window, _STEP), []
    for start in range(0, length, step):
        first, end = max(0, start - window + 1), min(start + step, length)
        places = torch.arange(first, end, device=query.device)
        far = places[start - first :, None] - places
        mask = ((far >= 0) & (far < window))[None, None]
        row = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        parts.append(sdpa_attention_forward(module, *row, mask, **how)[0])
    return torch.cat(parts, 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer's attention is called with, beside tensors of its tokens."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    scaling: float | None
    window: int | None = None
    causal: bool = True


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """How the queries and keys of a flat batch belong together; made by `lay_out`. `parts` see to its tokens in their order."""

    parts: tuple[Part, ...]
    heard: set[Call] | None = None
    """Where layers leave how they call; None: nobody asks."""

    def to(self, device: torch.device | str) -> SharedPrompts:
        return SharedPrompts(tuple(part.to(device) for part in self.parts), self.heard)

    @contextmanager
    def arguments(self, input_ids: torch.Tensor) -> Iterator[dict[str, Any]]:
        """What to call the model with beside `input_ids`, while the context lasts: it makes no mask for a batch that has its own.
        Told that nothing is padding, it looks for no sequences in the positions, and asks for its layers' masks as they are."""
        token = _applied.set(self)
        try:
            yield {_ARGUMENT: self, "attention_mask": torch.ones_like(input_ids)}
        finally:
            _applied.reset(token)


def lay_out(segments: Sequence[Segment], attn: str = "sdpa") -> tuple[list[int], SharedPrompts]:
    """(first token of each segment in the flat batch, how they attend with "sdpa" or a kernel). Empty segments take no room."""
    if attn in KERNELS:
        starts, runs = _runs(segments)
        return starts, SharedPrompts((KERNELS[attn].of(runs),))
    classes: defaultdict[tuple[bool, int, int], list[int]] = defaultdict(list)
    for index, segment in enumerate(segments):
        if segment.length:
            classes[segment.prompt is not None, _class(_before(segments, index)), _class(segment.length)].append(index)
    starts, blocks, end = [0] * len(segments), [], 0
    for name in sorted(classes):
        for part in _parts(segments, classes[name]):
            for index in part:
                starts[index], end = end, end + segments[index].length
            blocks.append(_block(segments, part, starts))
    return starts, SharedPrompts(tuple(blocks))


def _runs(segments: Sequence[Segment]) -> tuple[list[int], list[Run]]:
    """Each prompt, and its answers right behind it: the first of them goes on where it ends."""
    starts, runs, end = [0] * len(segments), list[Run](), 0
    last: int | None = None  # the prompt that ends where the next segment begins
    for index in sorted(
        range(len(segments)), key=lambda i: (i if segments[i].prompt is None else segments[i].prompt, i)
    ):
        segment, starts[index] = segments[index], end
        if not segment.length:
            continue
        prompt = segment.prompt
        if prompt is not None and prompt == last:
            runs[-1] = Run(runs[-1].start, runs[-1].length + segment.length)
        elif prompt is None or not segments[prompt].length:
            runs.append(Run(end, segment.length))
        else:
            runs.append(Run(end, segment.length, starts[prompt], segments[prompt].length))
        last, end = (index if prompt is None else None), end + segment.length
    return starts, runs


def _class(length: int) -> int:
    return -1 if length == 0 else math.ceil(_CLASSES_PER_OCTAVE * math.log2(length))


def _parts(segments: Sequence[Segment], indices: list[int]) -> Iterator[list[int]]:
    """The segments of a class, the longest first, cut where a block's mask would become too large."""
    ordered = sorted(indices, key=lambda index: -segments[index].length)
    width, depth = segments[ordered[0]].length, max(_before(segments, index) for index in ordered)
    size = _MOST_SCORES // (width * (width + depth)) if _masked(width, depth) else len(ordered)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _before(segments: Sequence[Segment], index: int) -> int:
    prompt = segments[index].prompt
    return 0 if prompt is None else segments[prompt].length


def _masked(width: int, depth: int) -> bool:
    """Whether segments of up to `width` tokens attend to prompts of up to `depth` with a mask; else their prompt is among the
    queries too, whose outcome is dropped: kernels for plain causal attention skip half of the scores, and need no mask."""
    return depth > width and width * (width + depth) <= _MOST_SCORES


def _block(segments: Sequence[Segment], part: list[int], starts: list[int]) -> Block:
    lengths = np.array([segments[index].length for index in part])[:, None]
    before = np.array([_before(segments, index) for index in part])[:, None]
    first = np.array([starts[index] for index in part])[:, None]
    first_before = np.array([starts[segments[index].prompt or 0] for index in part])[:, None]
    start, stop = int(first[0, 0]), int(first[-1, 0] + lengths[-1, 0])
    width, depth = int(lengths.max()), int(before.max())
    # What pads a row is a token that is there: it is always something finite to see, and nobody looks at the outcome.
    if not _masked(width, depth):
        column = np.arange(int((before + lengths).max()))
        own = (column >= before) & (column < before + lengths)
        row = np.where(column < before, first_before + column, first + np.where(own, column - before, 0))
        if own.all():
            return Block(start, stop, len(part))
        return Block(start, stop, len(part), queries=_index(row), kept=_index(np.flatnonzero(own)))
    column, column_before = np.arange(width), np.arange(depth)
    own, seen = column < lengths, column_before < before
    queries = first + np.where(own, column, 0)
    keys = np.concatenate([np.where(seen, first_before + column_before, 0), queries], axis=1)
    rows = 1 if seen.all() else len(part)  # of the mask
    causal = np.broadcast_to(np.tril(np.ones((width, width), bool)), (rows, width, width))
    mask = np.concatenate([np.broadcast_to(seen[:rows, None], (rows, width, depth)), causal], axis=2)
    return Block(
        start,
        stop,
        len(part),
        queries=None if own.all() else _index(queries),
        keys=_index(keys),
        kept=None if own.all() else _index(np.flatnonzero(own)),
        mask=torch.from_numpy(mask[:, None]),
        before=_index(before[:rows]),
    )


def _index(places: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(places.ravel().astype(np.int64))


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Window | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prompts: SharedPrompts | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, N, D], key [1, key heads, N, D], value [1, key heads, N, value D] ->
    [1, N, heads, value D].

    Without `shared_prompts` it is "sdpa". Raises OtherAttention for layers that are neither full causal attention nor that in a
    window.
    """
    if shared_prompts is None:
        assert not isinstance(attention_mask, Window)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
    window = attention_mask.tokens if isinstance(attention_mask, Window) else None
    given = [name for name in _REFUSED if others.get(name) is not None]
    if others.get("sliding_window") not in (None, window):
        given.append("a window that its mask has not")
    if attention_mask is not None and window is None:  # the layer has made one of its own: the batch's says None
        given.append("a mask of its own")
    if given:
        raise OtherAttention(f"{type(module).__name__} attends with {given[0]}")
    if shared_prompts.heard is not None:
        shared_prompts.heard.add(Call(query.shape[1], key.shape[1], query.shape[3], value.shape[3], scaling, window))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    how = {"scaling": scaling, "dropout": dropout, "window": window}
    parts = [part.attend(module, q, k, v, **how) for part in shared_prompts.parts]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _mask(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> torch.Tensor | Window | None:
    """transformers' mask function: `mask_function` says who sees whom, and a window of `local_size` is in it too."""
    applied = _applied.get()
    if applied is None:
        return sdpa_mask(*args, mask_function=mask_function, **kwargs)
    if mask_function is causal_mask_function:
        return None
    window = kwargs.get("local_size")
    if window is None or (applied.heard is not None and not _is_window(mask_function, window)):
        raise OtherAttention("its masks are neither plain causal ones nor windows of them")
    return Window(window)


def _is_window(mask_function: Any, window: int) -> bool:
    """Asked of places on both sides of its border, while a model is tried out."""
    places = torch.tensor([0, 1, window - 1, window, window + 1, 2 * window])
    far = places[:, None] - places
    zero = torch.tensor(0)
    return torch.equal(mask_function(zero, zero, places[:, None], places[None]), (far >= 0) & (far < window))


def stay_outside_of_graphs() -> None:
    """What torch.compile makes of a layer calls `attention` as it is."""
    AttentionInterface.register(NAME, torch.compiler.disable(attention))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)


def share_prompts(model: Any) -> bool:
    """Make `model` take flat batches, where it can; else it is left as it is. Tried out once, before it is sharded."""
    return not why_apart(model)


def why_apart(model: Any) -> str:
    """Why `model` takes no flat batches, "" where it does: its attention is torch's (`model.attn="sdpa"`), and is causal in each
    layer, full or in a window."""
    if model not in _apart:
        _apart[model] = other_attention(model) or _tried(model)
    return _apart[model]


def calls_of(model: Any) -> set[Call]:
    """How the layers of a model that takes flat batches call their attention."""
    return set() if why_apart(model) else _calls[model]


def other_attention(model: Any) -> str:
    """What the config of `model` says against flat batches, "" where it says nothing."""
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is no model of transformers"
    text = model.config.get_text_config()
    if text._attn_implementation != "sdpa":
        return f"its attention is {text._attn_implementation}"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    return f"its layers are {', '.join(others)}" if others else ""


def share_prompts_as(model: Any, other: Any | None) -> None:
    """What was found out of `other`, a model of the same kind, holds for `model`; None: it would pass every trial."""
    _apart[model] = other_attention(model) if other is None else why_apart(other)
    if not _apart[model]:
        _attend_with(model, NAME)


def _tried(model: Any) -> str:
    """Switches the attention of `model`, and back where two samples of a prompt, beside each other and another prompt, have other
    logits than alone."""
    _attend_with(model, NAME)
    try:
        with trial(model):
            problem = _compared(model, _calls.setdefault(model, set()))
    except Failed as error:
        problem = str(error)
    if problem:
        _attend_with(model, "sdpa")
    return problem


def _attend_with(model: Any, name: str) -> None:
    inner = next(
        (each for each in model.config.sub_configs if getattr(model.config, each) is model.config.get_text_config()),
        None,
    )
    model.set_attn_implementation(name if inner is None else {inner: name})


def _compared(model: Any, heard: set[Call]) -> str:
    prompts, samples = ([1, 2, 3, 1, 2], [3, 2, 1]), ((0, [2, 2, 1]), (0, [3, 1]), (1, [1, 3]))
    segments = [Segment(len(prompt)) for prompt in prompts] + [Segment(len(own), prompt) for prompt, own in samples]
    starts, shared = lay_out(segments)
    num_tokens = sum(segment.length for segment in segments)
    ids, positions = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    for index, (start, segment, tokens) in enumerate(
        zip(starts, segments, [*prompts, *(own for _, own in samples)], strict=True)
    ):
        before = _before(segments, index)
        ids[start : start + segment.length] = tokens
        positions[start : start + segment.length] = before + np.arange(segment.length)
    device = next(model.parameters()).device
    axes = torch.from_numpy(positions)[None].to(device)
    if family_of(model) is not None:
        axes = axes.expand(4, 1, -1)
    input_ids = torch.from_numpy(ids)[None].to(device)
    with SharedPrompts(shared.parts, heard).to(device).arguments(input_ids) as arguments:
        flat = logits_of(model, input_ids=input_ids, position_ids=axes, **arguments)[0]
    for (prompt, own), start in zip(samples, starts[len(prompts) :], strict=True):
        whole = torch.tensor([[*prompts[prompt], *own]], device=device)
        alone = logits_of(model, input_ids=whole)[0, len(prompts[prompt]) :]
        if problem := differs(flat[start : start + len(own)], alone):
            return problem
    return ""
