"""Sequences of different lengths as one batch with hardly any padding, whatever the lengths.

Owns which sequence lies where, and the indices that bring the response positions back in the callers' order. Does not own who
attends to whom. A *flat* batch is one row in which what sequences begin with is there once for all of them (`prefix_tree.py`);
`shared_prefixes.py` says which models take it, and how its tokens attend. The others get *rows* of one
length, for which transformers makes the masks from `position_ids`, whatever kernel and layer type (a row with several sequences
restarts its positions, so each attends to itself only). Pure: equal sequences give equal batches.

Models of multimodal families get positions on four axes: text (which restarts with each sequence and keeps them apart), time,
height and width. The media of a batch are in the order in which their placeholders lie in its rows. In training such a batch
holds one sequence more, the family's dummy, which has every modality and is not scored: so each tower runs in every micro-batch
on every rank, in the same order, with gradients that are 0 where nothing else used it.

Invariant: every response token of every sequence is scored once, from the position before it; the order is the callers'.

    rows: lengths 7 5 4 3 2  ->  row length 7, bins by first fit, longest first      flat: prompt aaa, samples AAAAA BB, prompt c

          aaaaaaa                                                                          aaa c AAAA B CCC
          bbbbbee                                                                          (a last token predicts nothing)
          ccccddd
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rondo.models.attention import chosen
from rondo.models.families import family_of
from rondo.models.media.batch import placeholder_ids
from rondo.models.media.inputs import MediaInputs
from rondo.models.prefix_tree import Line, tree_of
from rondo.models.rotations import check_length, longest_alike
from rondo.models.routing import Routes
from rondo.models.shared_prefixes import Segment, SharedPrefixes, lay_out, share_prefixes_as, why_apart
from rondo.models.trials import Failed, differs, logits_of, trial
from rondo.runtime.errors import ConfigError

_alone: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sequence:
    """`tokens`, integers [T], of which the last `response` are scored; 0 <= response < T. `media` are those of the prompt, and
    of turns behind it, whose placeholders are among the tokens. `experts`, integers [T - 1, layers, top_k], are those that an
    engine sent all tokens but the last one to; None or empty where it told none."""

    tokens: np.ndarray
    response: int
    media: MediaInputs | None = field(default=None, repr=False)
    experts: np.ndarray | None = field(default=None, repr=False)

    @property
    def cost(self) -> int:
        """Tokens, and what the encoders take, each as a token."""
        return len(self.tokens) + (self.media.encoder_positions if self.media is not None else 0)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B rows of L tokens that hold every sequence once; R response tokens over all sequences."""

    input_ids: torch.Tensor  # int64 [B, L]; 0 where no sequence lies
    # int64 [B, L], restarting at 0; None: no row holds two sequences. Multimodal: float32 [4, B, L], always there.
    position_ids: torch.Tensor | None
    positions: torch.Tensor  # int64 [R], index into the flat [B * L] of the position that predicts the token
    targets: torch.Tensor  # int64 [R], the response tokens, sequence after sequence as given
    responses: tuple[int, ...]
    num_tokens: int
    media: tuple[MediaInputs, ...] = ()  # in the order of their placeholders in the flat [B * L]
    shared: SharedPrefixes | None = None  # of a flat batch, B = 1: how its tokens see each other
    # int64 [B, L]: what to embed, where `input_ids` hides placeholders that stand for no feature; None: nothing is hidden.
    embedded_ids: torch.Tensor | None = None
    routes: Routes | None = None  # of the flat [B * L]; None: nothing was recorded
    # bool [B * L], where a token of the sequences lies; None: everywhere.
    counted: torch.Tensor | None = None
    # Of each sequence: where the pieces begin that its tokens but the last lie in, and how many those are.
    pieces: tuple[tuple[tuple[int, int], ...], ...] = ()

    def of_sequences(self, told: np.ndarray) -> list[np.ndarray]:
        """[B * L, ...] by position -> of each sequence [T - 1, ...], of all its tokens but the last; copies."""
        return [np.concatenate([told[at : at + size] for at, size in own]) for own in self.pieces]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            positions=self.positions.to(device),
            targets=self.targets.to(device),
            shared=None if self.shared is None else self.shared.to(device),
            embedded_ids=None if self.embedded_ids is None else self.embedded_ids.to(device),
            routes=None if self.routes is None else self.routes.to(device),
            counted=None if self.counted is None else self.counted.to(device),
        )


@dataclass(frozen=True, slots=True)
class Packing:
    """How one model wants its sequences. Found out once, before the model is sharded."""

    share_prefixes: bool
    share_rows: bool
    dummy: Sequence | None
    """Of a multimodal family: what every batch of training holds beside its sequences."""
    placeholders: tuple[int, ...] = ()
    longest: int | None = None
    """Most tokens of a sequence, where those beside a longer one would be rotated otherwise."""
    model_name: str = ""
    attn: str = "sdpa"
    """What reads its flat batches."""

    @classmethod
    def of(cls, model: Any) -> Packing:
        """Beginnings are shared where the model can; its attention is switched to that of `shared_prefixes.py` then, and flat
        batches are for the kernel that was chosen for it (`attention.py`). What it cannot, and why, is in the log."""
        name, apart, alone = type(model).__name__, why_apart(model), why_alone(model)
        if apart:
            log.warning("prompts are computed for each sample again: model=%s reason=%r", name, apart)
        if apart and alone:
            log.warning("every sample is padded to the longest: model=%s reason=%r", name, alone)
        family = family_of(model)
        dummy = None
        if family is not None:
            tokens, media = family.dummy(model.config)
            dummy = Sequence(tokens, 0, media)
        kernel = chosen(model).name
        return cls(not apart, not alone, dummy, placeholder_ids(model), longest_alike(model), name, kernel)

    @classmethod
    def alike(cls, model: Any, other: Any | None) -> Packing:
        """As `of`, but nothing is tried: what was found out of `other`, a model of the same kind, holds for `model`; None: it
        would pass every trial."""
        share_prefixes_as(model, other)
        _alone[model] = "" if other is None else why_alone(other)
        return cls.of(model)

    def pack(self, sequences: Ordered[Sequence], *, train: bool = False, behind: bool = False) -> PackedBatch:
        """The batch of these sequences; with `train` every tower has work in it. ConfigError as from `pack`, and for a sequence
        beyond `longest`. behind: of each, the state behind its last token, too."""
        check_length(self.model_name, self.longest, max((len(one.tokens) for one in sequences), default=0))
        return pack(
            sequences, share_prefixes=self.share_prefixes, share_rows=self.share_rows, multimodal=self.dummy is not None,
            dummy=self.dummy if train else None, placeholders=self.placeholders, attn=self.attn,
            behind=behind,
        )  # fmt: skip


def why_alone(model: Any) -> str:
    """Why each sequence needs a row of its own in `model`, "" where it needs none. Tried out once, before it is sharded.

    It does where layers carry a state from token to token, where positions are no input, and in a few families whose masks ignore
    positions; no declaration of theirs tells them all apart.
    """
    if model not in _alone:
        named = inspect.signature(type(model).forward).parameters
        _alone[model] = _mixed(model) if "position_ids" in named else "it takes no positions"
    return _alone[model]


def _mixed(model: Any) -> str:
    """Whether a sequence has other logits behind another one in its row than alone. Tried with two rows: some attentions keep
    the sequences of a single one apart."""
    device = next(model.parameters()).device
    first, second = [1, 2, 3, 1, 2], [3, 2, 1, 0]
    positions = torch.tensor([[*range(len(first)), *range(len(second))]] * 2, device=device)
    if family_of(model) is not None:
        positions = positions.expand(4, 2, -1)
    try:
        with trial(model):
            ids = torch.tensor([first + second] * 2, device=device)
            shared = logits_of(model, input_ids=ids, position_ids=positions)
            alone = logits_of(model, input_ids=torch.tensor([second], device=device))
    except Failed as error:
        return str(error)
    return differs(shared[1, len(first) :], alone[0])


def pack(
    sequences: Ordered[Sequence],
    *,
    share_prefixes: bool = False,
    share_rows: bool = True,
    multimodal: bool = False,
    dummy: Sequence | None = None,
    placeholders: Ordered[int] = (),
    attn: str = "sdpa",
    behind: bool = False,
) -> PackedBatch:
    """One flat row for `attn` with `share_prefixes`, which leaves out a sequence's last token (it predicts nothing); else rows as
    long as the longest sequence, one sequence a row unless `share_rows`.

    `multimodal` makes positions on four axes. `dummy` is one more sequence that nobody sees in the results. `placeholders` are
    tokens that stand for features where media lie, and nowhere else. With `behind`, for values alone, `positions` are one
    more of each sequence than its targets: that of its last token. Raises ConfigError for no sequences, a response that
    leaves no prompt, or experts of other tokens.
    """
    _check(sequences)
    every = [*sequences, dummy] if dummy is not None else sequences
    shared = None
    lies_in: Ordered[Ordered[int]] = [
        (index,) for index in range(len(every))
    ]  # the pieces that each sequence is made of
    if share_prefixes:
        segments, pieces, lies_in = _segments(every, behind)
        starts, shared = lay_out(segments, attn)
        num_rows, width = 1, sum(segment.length for segment in segments)
    else:
        pieces = [(sequence, 0, len(sequence.tokens)) for sequence in every]
        width = max(len(sequence.tokens) for sequence in every)
        starts, num_rows = _first_fit([end for _, _, end in pieces], width, share_rows)
    input_ids = np.zeros(num_rows * width, np.int64)
    features, counted = np.zeros(num_rows * width, bool), np.zeros(num_rows * width, bool)
    # Padding goes on where it lies: after two sequences that is one more sequence of the row, so it too has something to
    # attend to.
    positions_AN = np.tile(
        np.arange(width, dtype=np.float32 if multimodal else np.int64), (4 if multimodal else 1, num_rows)
    )
    media, routes = [], []
    for (sequence, begin, end), start in zip(pieces, starts, strict=True):
        here = slice(start, start + end - begin)
        input_ids[here], counted[here] = sequence.tokens[begin:end], sequence is not dummy
        positions_AN[:, here] = _axes(sequence)[:, begin:end] if multimodal else np.arange(begin, end)
        routes.append((None if sequence.experts is None else sequence.experts[begin:end], start))
        for at, part in sequence.media.placed if sequence.media is not None else ():
            if begin <= at < end:
                place, last = start + at - begin, start + end - begin
                features[place : min(place + part.positions.shape[1], last)] = True
                media.append((place, part))
    positions, targets = [np.arange(0)], [np.arange(0)]
    for sequence, own in zip(sequences, lies_in, strict=False):
        first, last = len(sequence.tokens) - sequence.response - 1, len(sequence.tokens) - (not behind)
        for piece in own:
            _, begin, end = pieces[piece]
            positions.append(starts[piece] - begin + np.arange(max(begin, first), max(begin, first, min(end, last))))
        targets.append(sequence.tokens[first + 1 :])
    hidden = hide_placeholders(input_ids, features, placeholders)
    ids_BL = torch.from_numpy(input_ids).view(num_rows, width)
    axes = torch.from_numpy(positions_AN).view(-1, num_rows, width)
    alone = not share_prefixes and num_rows == len(every)
    return PackedBatch(
        input_ids=ids_BL if hidden is None else torch.from_numpy(hidden).view(num_rows, width),
        embedded_ids=None if hidden is None else ids_BL,
        position_ids=axes if multimodal else None if alone else axes[0],
        positions=torch.from_numpy(np.concatenate(positions).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        responses=tuple(sequence.response for sequence in sequences),
        num_tokens=sum(end - begin for _, begin, end in pieces),
        shared=shared,
        media=tuple(found for _, found in sorted(media, key=lambda item: item[0])),
        routes=_routes(routes, num_rows * width),
        counted=None if counted.all() else torch.from_numpy(counted),
        pieces=tuple(
            _places(one, [(starts[p], pieces[p]) for p in own]) for one, own in zip(sequences, lies_in, strict=False)
        ),
    )


def _places(one: Sequence, pieces: Iterable[tuple[int, tuple[Sequence, int, int]]]) -> tuple[tuple[int, int], ...]:
    """(where it begins, how many) of all tokens but the last. pieces: with where each begins."""
    return tuple((start, max(0, min(end, len(one.tokens) - 1) - begin)) for start, (_, begin, end) in pieces)


def _segments(
    sequences: Ordered[Sequence], behind: bool
) -> tuple[list[Segment], list[tuple[Sequence, int, int]], list[tuple[int, ...]]]:
    """Segments, the (sequence, first token, last token + 1) that each holds, and those that each sequence lies in."""
    lines = []
    for one in sequences:
        placed = () if one.media is None else one.media.placed
        media = tuple((at, part.positions.shape[1], part.key) for at, part in placed)
        lines.append(Line(one.tokens, len(one.tokens) - (one.response > 0 and not behind), media, one.experts))
    nodes, paths = tree_of(lines)
    segments = [Segment(node.end - node.begin, node.parent) for node in nodes]
    return segments, [(sequences[node.line], node.begin, node.end) for node in nodes], paths


def hide_placeholders(ids: np.ndarray, features: np.ndarray, placeholders: Ordered[int]) -> np.ndarray | None:
    """`ids` (integers) with every placeholder where `features` (bool, the same shape) is False replaced by token 0; None when
    there is none."""
    hidden = np.isin(ids, placeholders) & ~features if placeholders else None
    return None if hidden is None or not hidden.any() else np.where(hidden, 0, ids)


def _routes(told: Iterable[tuple[np.ndarray | None, int]], num_positions: int) -> Routes | None:
    """Recordings [tokens, layers, top_k] from the positions on where they begin; None where there is none."""
    found = [(experts, start) for experts, start in told if experts is not None and len(experts)]
    if not found:
        return None
    first, _ = found[0]
    experts = np.zeros((num_positions, *first.shape[1:]), first.dtype)
    recorded = np.zeros(num_positions, bool)
    for part, start in found:
        experts[start : start + len(part)] = part
        recorded[start : start + len(part)] = True
    return Routes(torch.from_numpy(experts), torch.from_numpy(recorded))


def _axes(sequence: Sequence) -> np.ndarray:
    """float32 [4, T]: text, time, height, width. What follows the prompt goes on from its greatest position."""
    plain = np.arange(len(sequence.tokens), dtype=np.float32)
    if sequence.media is None:
        return np.tile(plain, (4, 1))
    prompt = sequence.media.positions
    rest = prompt.max() + 1 + np.arange(len(plain) - prompt.shape[1], dtype=np.float32)
    return np.concatenate([plain[None], np.concatenate([prompt, np.tile(rest, (3, 1))], axis=1)])


def _first_fit(lengths: list[int], width: int, share_rows: bool) -> tuple[list[int], int]:
    """Where each sequence begins in rows of `width` behind each other, and the number of rows: first fit, longest first, ties in
    the order given."""
    if not share_rows:
        return [row * width for row in range(len(lengths))], len(lengths)
    starts = [0] * len(lengths)
    shortest = min(lengths)
    used: list[int] = []
    open_rows: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        row = next((row for row in open_rows if used[row] + length <= width), None)
        if row is None:
            row = len(used)
            used.append(0)
            open_rows.append(row)
        starts[index] = row * width + used[row]
        used[row] += length
        if used[row] + shortest > width:
            open_rows.remove(row)
    return starts, len(used)


def _check(sequences: Ordered[Sequence]) -> None:
    if not sequences:
        raise ConfigError("a batch must hold at least one sequence, got none. Skip empty micro-batches")
    for index, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        if not 0 <= sequence.response < length:
            raise ConfigError(
                f"response of sequence {index} must leave at least one prompt token, got {sequence.response} of {length} "
                "tokens. Give every sample a prompt"
            )
        if sequence.experts is not None and len(sequence.experts) not in (0, length - 1):
            raise ConfigError(
                f"experts of sequence {index} must be those of all its {length} tokens but the last, got "
                f"{len(sequence.experts)}. Record them where the sequence is sampled"
            )
