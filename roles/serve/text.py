"""Text: from tokens, as they come, to text that will not change any more, and to where a stop string ends it.

Owns which part of the text is settled: a character whose last byte is still to come is not. Owns no token: they are counted,
never changed, so that a stop string found in the text says how many of the sampled tokens are kept. What a token adds is known
from `pieces.py`.

    reader = TextReader(tokenizer, stops=("END",))
    reader.feed([72, 105])          # None: goes on; reader.text == "Hi"
    reader.feed([72, 105, 69, ...]) # 5: the first five tokens are the answer, reader.text == "Hi"

Invariant: `text` only grows, until a stop string cuts it, and is at the end what the tokenizer makes of all tokens: where bytes
make no character, they are replaced as it replaces them, but for what was settled before. A token costs the same however long the
text is.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rondo.roles.serve.pieces import REPLACEMENT, pieces_of
from rondo.roles.serve.stop_strings import StopSearch


class TextReader:
    """Reads one sample. `stops` end it; the one that did is `matched`, and is no part of `text` unless `keep_stop`.

    `after` is the token that the sample follows, where its text is to be that behind a prompt: without it, some decoders leave a
    space at its beginning out.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
        after: int | None = None,
    ) -> None:
        self._pieces = pieces_of(tokenizer)
        self._hidden = self._pieces.special if skip_special_tokens else frozenset[int]()
        self._keep_stop = keep_stop
        self._search = StopSearch(stops) if stops else None
        errors = "replace" if self._pieces.kind == "bytes" else "rondo-each-byte"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._before = after
        self._num_tokens = 0
        self.text = ""

    @property
    def matched(self) -> str | None:
        return None if self._search is None else self._search.matched

    def feed(self, tokens: Sequence[int] | np.ndarray) -> int | None:
        """Takes the whole sample so far; the number of its tokens that are kept once a stop string has ended it."""
        new = [int(token) for token in tokens[self._num_tokens :]]
        search = self._search
        before = (self._before, self._utf8.getstate(), None if search is None else search.state)
        piece = self._piece(new)
        if search is None or search.feed(piece) is None:
            self._num_tokens += len(new)
            self.text += piece
            return None
        # Which of the new tokens completed it: the same again, one by one.
        self._before, state, search.state = before  # type: ignore[assignment]
        self._utf8.setstate(state)
        for token in new:
            self._num_tokens += 1
            if self._say(self._piece([token])):
                return self._num_tokens
        raise AssertionError("a stop string that was found must be found again")

    def finish(self, tokens: Sequence[int] | np.ndarray) -> int | None:
        """The last feed. What is still incomplete then stays so: it becomes part of the text."""
        kept = self.feed(tokens)
        if kept is None and self._say(self._utf8.decode(b"", final=True)):
            return self._num_tokens
        return kept

    @property
    def shown(self) -> str:
        """The part of the text that no later token can turn into the beginning of a stop string."""
        depth = 0 if self._search is None else self._search.depth
        return self.text[:-depth] if depth else self.text

    def _say(self, piece: str) -> bool:
        """Adds it; whether it completes a stop string, behind which the text ends."""
        read = None if self._search is None else self._search.feed(piece)
        self.text += piece if read is None else piece[:read]
        if read is None:
            return False
        assert self.matched is not None
        if not self._keep_stop:
            self.text = self.text[: -len(self.matched)]
        return True

    def _piece(self, tokens: Sequence[int]) -> str:
        """What these add to the text that is settled."""
        pieces, found = self._pieces, []
        for is_text, run in itertools.groupby(
            (token for token in tokens if token not in self._hidden), lambda token: pieces.raw(token) is None
        ):
            group = list(run)
            if is_text:
                found += [self._utf8.decode(b"", final=True), pieces.after(self._before, group)]
            else:
                found.append(self._utf8.decode(b"".join(pieces.raw(token) or b"" for token in group)))
            self._before = group[-1]
        return "".join(found)


def text_of(tokenizer: Any, tokens: Sequence[int] | np.ndarray, *, after: int | None = None) -> str:
    """The whole text of tokens, special ones included, behind the token `after` where there is one."""
    reader = TextReader(tokenizer, skip_special_tokens=False, after=after)
    reader.finish(tokens)
    return reader.text


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """As decoders with a fallback to bytes replace: one character for each byte that belongs to none."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("rondo-each-byte", _each_byte)
