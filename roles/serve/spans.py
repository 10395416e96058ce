"""Spans: what the calls of a session have in common, stored once.

Owns the tree of a session's tokens, and the rows to train on that it makes. Does not own sessions or their limits
(`trajectory.py`).

    turn 1   prompt "Q1 A:"                  spans  [Q1 A:]                              sampled [abc]
    turn 2   prompt "Q1 A:abc Q2 A:"                [Q1 A:] [abc] [ Q2 A:]               sampled [d]

A span is a stretch of one source, a prompt's or the policy's, and follows another; a call is the path to the end of its prompt
and the span that was sampled there.

Invariant: a path, its tokens and its text never change; each token of a session lies in one span.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rondo.roles.engines.engine import Prefix


@dataclass(slots=True, eq=False)
class Span:
    """`tokens` int32 [T] and their text, behind `before`. Of sampled ones `log_probs` float32 [T] and `policy_versions` int32
    [T]. The whole path has `num_tokens` and `num_chars`."""

    before: Span | None = field(repr=False)
    tokens: np.ndarray
    text: str
    log_probs: np.ndarray | None = None
    policy_versions: np.ndarray | None = None
    following: list[Span] = field(default_factory=list, repr=False)
    num_tokens: int = field(init=False)
    num_chars: int = field(init=False)

    def __post_init__(self) -> None:
        before = self.before
        self.num_tokens = len(self.tokens) + (0 if before is None else before.num_tokens)
        self.num_chars = len(self.text) + (0 if before is None else before.num_chars)

    @classmethod
    def root(cls) -> Span:
        """What everything follows, and holds nothing."""
        return cls(None, np.zeros(0, np.int32), "")

    @property
    def num_bytes(self) -> int:
        arrays = (self.tokens, self.log_probs, self.policy_versions)
        return sys.getsizeof(self.text) + sum(each.nbytes for each in arrays if each is not None)

    def path(self) -> list[Span]:
        """From the first span to this one."""
        found, at = [], self
        while at.before is not None:
            found.append(at)
            at = at.before
        return found[::-1]

    def tokens_to_here(self) -> np.ndarray:
        """int32 [T] of the whole path."""
        return np.concatenate([np.zeros(0, np.int32), *(span.tokens for span in self.path())])

    def text_to_here(self) -> str:
        return "".join(span.text for span in self.path())

    def longest(self, has: Callable[[Span], bool]) -> Span:
        """The farthest span below this one of whose path somebody's prompt has every span at its place."""
        best, left = self, [self]
        while left:
            span = left.pop()
            if (span.num_chars, span.num_tokens) > (best.num_chars, best.num_tokens):
                best = span
            left += filter(has, span.following)
        return best

    def add(self, tokens: np.ndarray, text: str) -> Span:
        """A prompt's tokens behind this one; what is there already is taken."""
        if not len(tokens):
            return self
        for each in self.following:
            if each.log_probs is None and each.text == text and np.array_equal(each.tokens, tokens):
                return each
        made = Span(self, tokens.astype(np.int32), text)
        self.following.append(made)
        return made

    def sample(self, sampled: Prefix, text: str) -> Span:
        """What the policy wrote behind this one."""
        made = Span(self, sampled.tokens, text, sampled.log_probs, sampled.policy_versions)
        self.following.append(made)
        return made


def in_text(text: str) -> Callable[[Span], bool]:
    """For `longest`: by what a prompt says."""
    return lambda span: text.startswith(span.text, span.num_chars - len(span.text))


def in_tokens(tokens: np.ndarray) -> Callable[[Span], bool]:
    """For `longest`: by a prompt's tokens, int32 [T]."""
    return lambda span: np.array_equal(tokens[span.num_tokens - len(span.tokens) : span.num_tokens], span.tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """Calls that go on from each other, as one sequence to train on. All arrays [T]: `tokens` int32, `loss_mask` uint8 (1 =
    sampled by the policy), `log_probs` float32 (0 where the mask is) and `policy_versions` int32 (-1 where the mask is 0)."""

    calls: tuple[str, ...]
    tokens: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray


class Chains:
    """Which calls of a session go on from each other: each of `rows` is one sequence to train on, the (name, what was sampled) of
    its calls, oldest first. A call goes on with the row that its prompt ends with the newest sample of, or else it begins one."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, Span]]] = []
        self._newest: dict[Span, list[tuple[str, Span]]] = {}  # what was sampled last of a row -> the row

    def tip(self, known: Span) -> Span | None:
        """What a call behind this goes on from; None where it begins a row."""
        return next((span for span in reversed(known.path()) if span in self._newest), None)

    def begin(self, tip: Span) -> int:
        """Tokens of the prompt that the row with this newest sample began with."""
        _, first = self._newest[tip][0]
        return first.num_tokens - len(first.tokens)

    def add(self, name: str, sampled: Span) -> None:
        assert sampled.before is not None
        tip = self.tip(sampled.before)
        row = [] if tip is None else self._newest.pop(tip)
        if tip is None:
            self.rows.append(row)
        row.append((name, sampled))
        self._newest[sampled] = row

    def sequences(self) -> Iterator[Row]:
        """Each sampled token in exactly one."""
        return map(_row, self.rows)


def _row(calls: Sequence[tuple[str, Span]]) -> Row:
    own = {sampled for _, sampled in calls}
    columns = []
    for span in calls[-1][1].path():
        size = len(span.tokens)
        if span in own:
            columns.append((span.tokens, np.ones(size, np.uint8), span.log_probs, span.policy_versions))
        else:
            nothing = np.zeros(size, np.float32), np.full(size, -1, np.int32)
            columns.append((span.tokens, np.zeros(size, np.uint8), *nothing))
    return Row(tuple(name for name, _ in calls), *map(np.concatenate, zip(*columns, strict=True)))
