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
from collections.abc import Iterable, Sequence
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
        self._hidden = self._pieces.special if skip_special_tokens else set[int]()
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
        return self._say(self._piece(int(token)) for token in tokens[self._num_tokens :])

    def finish(self, tokens: Sequence[int] | np.ndarray) -> int | None:
        """The last feed. What is still incomplete then stays so: it becomes part of the text."""
        kept = self.feed(tokens)
        return self._say([self._utf8.decode(b"", final=True)]) if kept is None else kept

    @property
    def shown(self) -> str:
        """The part of the text that no later token can turn into the beginning of a stop string."""
        depth = 0 if self._search is None else self._search.depth
        return self.text[:-depth] if depth else self.text

    def _say(self, pieces: Iterable[str]) -> int | None:
        """Adds them, until a stop string is complete; then how many tokens that took."""
        found, read = [], None
        for piece in pieces:
            read = None if self._search is None else self._search.feed(piece)
            found.append(piece[:read])
            if read is not None:
                break
        self.text += "".join(found)
        if read is None:
            return None
        assert self.matched is not None
        if not self._keep_stop:
            self.text = self.text[: -len(self.matched)]
        return self._num_tokens

    def _piece(self, token: int) -> str:
        """What the next token adds to the text that is settled."""
        self._num_tokens += 1
        if token in self._hidden:
            return ""
        raw, before, self._before = self._pieces.raw(token), self._before, token
        if raw is not None:
            return self._utf8.decode(raw)
        return self._utf8.decode(b"", final=True) + self._pieces.after(before, token)


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
