"""Tokens that sequences begin with once for all of them: a flat batch, and the attention that reads it.

Owns where each token lies in a flat batch, which keys each query sees, and the attention function that does it for any model of
transformers whose layers are causal attention, full or in a window. Does not own what else a batch holds (`packing.py`), what its
sequences have in common (`prefix_tree.py`), nor what a GPU's kernels are told of it (`kernels.py`).

The samples of a prompt group begin alike, so do the turns of an episode and the branches of a session; and what a token's layers
make of it depends on the tokens before it alone. So what sequences begin with is computed once, and its keys and values serve all
of them; nothing is padded but inside attention. The gradient is the same sum in another order.

    prompt a with samples A B C, of which C has branches E F       flat:  aaaa AAAAA BBB CCC EEEE FF
                                                                           |_______________|____|
                                                             queries EEEE see keys aaaa CCC EEEE

With "sdpa" attention goes by blocks: segments of about one length, each a row, padded to the longest of its block. A query sees
the segments before its own on the way from the root, and its own up to itself. A kernel takes the batch whole, depth first.

Invariant: each token is in one segment, and a block's segments lie behind each other in the flat batch. A layer computes as it
always does where a batch has no `SharedPrefixes`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
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

NAME = "rondo_shared_prefixes"
"""Of this attention, among those of transformers."""
_ARGUMENT = "shared_prefixes"
_CLASSES_PER_OCTAVE = 2
"""Segments share a block when their lengths, and those of what they are behind, are of one class: within 41 % of each other."""
_MOST_SCORES = 1 << 26
"""Most queries times keys of a block with a mask, which has as many bytes where what the rows are behind differs in length."""
_STEP = 512
"""Fewest queries that are taken at a time in a window."""
_NOTHING = np.zeros(0, np.int64)
_REFUSED = ("softcap", "position_bias", "s_aux")
_applied: ContextVar[SharedPrefixes | None] = ContextVar("shared_prefixes", default=None)
_apart: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Any, set[Call]] = WeakKeyDictionary()


class OtherAttention(Failed):
    """A layer attends in a way that flat batches do not have. Met while a model is tried out, which then gets rows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`length` tokens that follow each other, all of them behind the segment `parent` (its index) and what that is behind, or
    behind nothing."""

    length: int
    parent: int | None = None


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
    before: torch.Tensor | None = None  # int64 [B or 1], of the keys in front of their own that the rows of `mask` see
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
class SharedPrefixes:
    """How the queries and keys of a flat batch belong together; made by `lay_out`. `parts` see to its tokens in their order."""

    parts: tuple[Part, ...]
    heard: set[Call] | None = None
    """Where layers leave how they call; None: nobody asks."""

    def to(self, device: torch.device | str) -> SharedPrefixes:
        return SharedPrefixes(tuple(part.to(device) for part in self.parts), self.heard)

    @contextmanager
    def arguments(self, input_ids: torch.Tensor) -> Iterator[dict[str, Any]]:
        """What to call the model with beside `input_ids`, while the context lasts: it makes no mask for a batch that has its own.
        Told that nothing is padding, it looks for no sequences in the positions, and asks for its layers' masks as they are."""
        token = _applied.set(self)
        try:
            yield {_ARGUMENT: self, "attention_mask": torch.ones_like(input_ids)}
        finally:
            _applied.reset(token)


def lay_out(segments: Sequence[Segment], attn: str = "sdpa") -> tuple[list[int], SharedPrefixes]:
    """(first token of each segment in the flat batch, how they attend with "sdpa" or a kernel). A segment comes behind the one
    that it is behind; empty ones take no room."""
    if attn in KERNELS:
        starts, runs = _runs(segments)
        return starts, SharedPrefixes((KERNELS[attn].of(runs),))
    befores = [sum(segments[at].length for at in way) for way in ways(segments)]
    classes: defaultdict[tuple[bool, int, int], list[int]] = defaultdict(list)
    for index, segment in enumerate(segments):
        if segment.length:
            classes[segment.parent is not None, _class(befores[index]), _class(segment.length)].append(index)
    parts = [part for name in sorted(classes) for part in _parts(segments, classes[name], befores)]
    starts, end = [0] * len(segments), 0
    for index in itertools.chain(*parts):
        starts[index], end = end, end + segments[index].length
    places = [np.arange(start, start + one.length) for start, one in zip(starts, segments, strict=True)]
    seen = [np.concatenate([_NOTHING, *(places[at] for at in way)]) for way in ways(segments)]
    return starts, SharedPrefixes(tuple(_block(segments, part, starts, [seen[at] for at in part]) for part in parts))


def ways(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """The segments that each one is behind, from the first on."""
    found: list[tuple[int, ...]] = []
    for segment in segments:
        found.append(() if segment.parent is None else (*found[segment.parent], segment.parent))
    return found


def _runs(segments: Sequence[Segment]) -> tuple[list[int], list[Run]]:
    """Depth first, what is behind a segment right behind it: the first of these goes on where it ends."""
    behind: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, segment in enumerate(segments):
        behind[segment.parent].append(index)
    starts, runs, end, before = [0] * len(segments), list[Run](), 0, ways(segments)
    waiting = behind[None][::-1]
    while waiting:
        index = waiting.pop()
        waiting += behind[index][::-1]
        length, starts[index] = segments[index].length, end
        seen = _joined([(starts[at], segments[at].length) for at in before[index] if segments[at].length])
        if length and seen and sum(seen[-1]) == end:
            runs[-1] = replace(runs[-1], length=runs[-1].length + length)
        elif length:
            runs.append(Run(end, length, seen))
        end += length
    return starts, runs


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same tokens, (first, how many); neighbours are one span."""
    found: list[tuple[int, int]] = []
    for start, length in spans:
        if found and sum(found[-1]) == start:
            start, length = found[-1][0], found.pop()[1] + length
        found.append((start, length))
    return tuple(found)


def _class(length: int) -> int:
    return -1 if length == 0 else math.ceil(_CLASSES_PER_OCTAVE * math.log2(length))


def _parts(segments: Sequence[Segment], indices: list[int], befores: Sequence[int]) -> Iterator[list[int]]:
    """The segments of a class, the longest first, cut where a block's mask would become too large."""
    ordered = sorted(indices, key=lambda index: -segments[index].length)
    width, depth = segments[ordered[0]].length, max(befores[index] for index in ordered)
    size = _MOST_SCORES // (width * (width + depth)) if _masked(width, depth) else len(ordered)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _masked(width: int, depth: int) -> bool:
    """Whether segments of up to `width` tokens attend to up to `depth` before them with a mask; else those are among the queries
    too, whose outcome is dropped: kernels for plain causal attention skip half of the scores, and need no mask."""
    return depth > width and width * (width + depth) <= _MOST_SCORES


def _block(segments: Sequence[Segment], part: list[int], starts: list[int], seen: Sequence[np.ndarray]) -> Block:
    """Of some neighbours. seen: the tokens before each, int64."""
    lengths = np.array([segments[index].length for index in part])[:, None]
    before = np.array([len(each) for each in seen])[:, None]
    first = np.array([starts[index] for index in part])[:, None]
    start, stop = int(first[0, 0]), int(first[-1, 0] + lengths[-1, 0])
    width, depth = int(lengths.max()), int(before.max())
    # What pads a row is a token that is there: it is always something finite to see, and nobody looks at the outcome.
    if not _masked(width, depth):
        column = np.arange(int((before + lengths).max()))
        own = (column >= before) & (column < before + lengths)
        if own.all():
            return Block(start, stop, len(part))
        queries = first + np.where(own, column - before, 0)
        for row, places in zip(queries, seen, strict=True):
            row[: len(places)] = places
        return Block(start, stop, len(part), queries=_index(queries), kept=_index(np.flatnonzero(own)))
    column, shown = np.arange(width), np.arange(depth) < before
    own = column < lengths
    queries = first + np.where(own, column, 0)
    keys = np.concatenate([np.zeros((len(part), depth), np.int64), queries], axis=1)
    for row, places in zip(keys, seen, strict=True):
        row[: len(places)] = places
    rows = 1 if shown.all() else len(part)  # of the mask
    causal = np.broadcast_to(np.tril(np.ones((width, width), bool)), (rows, width, width))
    mask = np.concatenate([np.broadcast_to(shown[:rows, None], (rows, width, depth)), causal], axis=2)
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
    shared_prefixes: SharedPrefixes | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, N, D], key [1, key heads, N, D], value [1, key heads, N, value D] ->
    [1, N, heads, value D].

    Without `shared_prefixes` it is "sdpa". Raises OtherAttention for layers that are neither full causal attention nor that in a
    window.
    """
    if shared_prefixes is None:
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
    if shared_prefixes.heard is not None:
        shared_prefixes.heard.add(Call(query.shape[1], key.shape[1], query.shape[3], value.shape[3], scaling, window))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    how = {"scaling": scaling, "dropout": dropout, "window": window}
    parts = [part.attend(module, q, k, v, **how) for part in shared_prefixes.parts]
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


def why_apart(model: Any) -> str:
    """Why `model` takes no flat batches, "" where it does, and is made to: its attention is torch's (`model.attn="sdpa"`), and is
    causal in each layer, full or in a window. Tried out once, before it is sharded."""
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


def share_prefixes_as(model: Any, other: Any | None) -> None:
    """What was found out of `other`, a model of the same kind, holds for `model`; None: it would pass every trial."""
    _apart[model] = other_attention(model) if other is None else why_apart(other)
    if not _apart[model]:
        _attend_with(model, NAME)


def _tried(model: Any) -> str:
    """Switches the attention of `model`, and back where samples of two prompts and what goes on behind them, in one batch, have
    other logits than alone."""
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
    told = (
        (None, [1, 2, 3, 1, 2]),
        (None, [3, 2, 1]),
        (0, [2, 2, 1]),
        (0, [3, 1]),
        (1, [1, 3]),
        (2, [3, 2]),
        (2, [1]),
        (6, [2]),
    )
    segments = [Segment(len(tokens), parent) for parent, tokens in told]
    starts, shared = lay_out(segments)
    whole = [[each for at in (*way, index) for each in told[at][1]] for index, way in enumerate(ways(segments))]
    places = [range(start, start + len(tokens)) for start, (_, tokens) in zip(starts, told, strict=True)]
    device = next(model.parameters()).device
    input_ids, positions = torch.zeros(2, 1, sum(map(len, places)), dtype=torch.int64, device=device)
    for tokens, place in zip(whole, places, strict=True):
        input_ids[0, place.start : place.stop] = torch.tensor(tokens[-len(place) :], device=device)
        positions[0, place.start : place.stop] = torch.arange(len(tokens) - len(place), len(tokens), device=device)
    axes = positions if family_of(model) is None else positions.expand(4, 1, -1)
    with SharedPrefixes(shared.parts, heard).to(device).arguments(input_ids) as arguments:
        flat = logits_of(model, input_ids=input_ids, position_ids=axes, **arguments)[0]
    for tokens, place in zip(whole[2:], places[2:], strict=True):
        alone = logits_of(model, input_ids=torch.tensor([tokens], device=device))[0, -len(place) :]
        if problem := differs(flat[place.start : place.stop], alone):
            return problem
    return ""
