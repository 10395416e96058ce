"""Text: from tokens, as they come, to text that will not change any more, and to where a stop string ends it.

Owns which part of the text is settled: a character whose last byte is still to come is not. Owns no token: they are counted,
never changed, so that a stop string found in the text says how many of the sampled tokens are kept.

    reader = TextReader(tokenizer, stops=("END",))
    reader.feed([72, 105])          # None: goes on; reader.text == "Hi"
    reader.feed([72, 105, 69, ...]) # 5: the first five tokens are the answer, reader.text == "Hi"

Invariant: `text` only grows, until a stop string cuts it. Decoding is over a window of the newest tokens, so that a long answer
costs no more a token than a short one; windows begin where two decoded parts, put together, are the decoded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_WINDOW = 48
"""Tokens from which a window is cut."""
_INCOMPLETE = "\ufffd"


class TextReader:
    """Reads one sample. `stops` end it; the one that did is `matched`, and is no part of `text` unless `keep_stop`."""

    def __init__(
        self, tokenizer: Any, *, stops: Sequence[str] = (), keep_stop: bool = False, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._skip = skip_special_tokens
        self._longest = max((len(stop) for stop in stops), default=0)
        self._tokens: list[int] = []
        self._from = 0  # the window's first token
        self._settled = 0  # characters of the window that are part of `text`
        self.text = ""
        self.matched: str | None = None

    def feed(self, tokens: Sequence[int] | np.ndarray) -> int | None:
        """Takes the whole sample so far; the number of its tokens that are kept once a stop string has ended it."""
        new = [int(token) for token in tokens[len(self._tokens) :]]
        if not new:
            return None
        before, num_before = (self._from, self._settled, self.text), len(self._tokens)
        self._take(new)
        if self._find(len(before[2])) is None:
            return None
        # Which of the new tokens completed it: the same again, one by one.
        del self._tokens[num_before:]
        self._from, self._settled, self.text = before
        for token in new:
            length = len(self.text)
            self._take([token])
            if (at := self._find(length)) is not None:
                self._cut(at)
                return len(self._tokens)
        raise AssertionError("a stop string that was found must be found again")

    def finish(self, tokens: Sequence[int] | np.ndarray) -> int | None:
        """The last feed. What is still incomplete then stays so: it becomes part of the text."""
        kept = self.feed(tokens)
        if kept is None:
            length = len(self.text)
            self.text += self._decode(self._tokens[self._from :])[self._settled :]
            if (at := self._find(length)) is not None:
                self._cut(at)
                return len(self._tokens)
        return kept

    @property
    def shown(self) -> str:
        """The part of the text that no later token can turn into the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return self.text[:-length]
        return self.text

    def _take(self, new: list[int]) -> None:
        self._tokens += new
        decoded = self._decode(self._tokens[self._from :])
        settled = decoded.removesuffix(_INCOMPLETE)
        self.text += settled[self._settled :]
        self._settled = max(self._settled, len(settled))
        if len(self._tokens) - self._from > _WINDOW:
            self._cut_window(decoded)

    def _cut_window(self, decoded: str) -> None:
        """Moves the window's begin to a place where nothing is split."""
        for begin in range(len(self._tokens) - 4, len(self._tokens) - 12, -1):
            head, tail = self._decode(self._tokens[self._from : begin]), self._decode(self._tokens[begin:])
            if head + tail == decoded:
                self._from, self._settled = begin, self._settled - len(head)
                return

    def _find(self, length: int) -> int | None:
        """Where the first stop string begins in the text, if it ends behind `length` characters."""
        start = max(0, length - self._longest + 1)
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, _, self.matched = min(found)
        return at

    def _cut(self, at: int) -> None:
        assert self.matched is not None
        self.text = self.text[: at + len(self.matched)] if self._keep_stop else self.text[:at]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text
