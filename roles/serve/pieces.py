"""Pieces: what each token of a tokenizer adds to a text, exactly, whatever its kind.

Owns the kinds. Owns no text (`text.py`). Three kinds are known, by what they make of the first byte of a long character:

    bytes       tokens are bytes (GPT-2, Llama-3, Qwen): what they say is put together and then read as UTF-8
    fallback    tokens are text, beside 256 of one byte each for what the vocabulary lacks (Llama-2, Mistral, Gemma)
    text        tokens are text alone (WordPiece, unigram)

Invariant: a piece depends on its token, and on what the one before it does to any that follows: so decoders set spaces.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

REPLACEMENT = "\ufffd"
_FIRST = 0xF0
"""A byte that makes no character alone."""


class Pieces:
    """Of one tokenizer; `pieces_of` keeps them. `kind` is as above."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = weakref.ref(tokenizer)  # which these pieces must not keep alive, nor so themselves
        added = tokenizer.added_tokens_decoder
        self.special = {token for token, each in added.items() if each.special} | {*tokenizer.all_special_ids}
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of a token, at most."""
        self.raw: Callable[[int], bytes | None] = functools.cache(self._read)
        """The bytes that a token stands for; None of one that stands for text."""
        self.alone: Callable[[int], str] = functools.cache(lambda token: self.text([token]))
        """The text of one token by itself."""
        ordinary = next((token for token in range(len(tokenizer)) if token not in added), 0)
        self._end = functools.cache(lambda before: self._beyond(before, ordinary))
        self._behind: dict[tuple[str, int], str] = {}
        self.kind: Literal["bytes", "fallback", "text"] = "text"
        self._bytes: dict[str, int] = {}
        for kind, alphabet in (("bytes", _byte_level()), ("fallback", {f"<0x{n:02X}>": n for n in range(256)})):
            name = next(name for name, byte in alphabet.items() if byte == _FIRST)
            token = tokenizer.convert_tokens_to_ids(name)
            if (
                token is not None
                and tokenizer.convert_ids_to_tokens(token) == name
                and self.text([token]) == REPLACEMENT
            ):
                self.kind, self._bytes = kind, alphabet  # type: ignore[assignment]
                return

    def text(self, tokens: Sequence[int]) -> str:
        """As the tokenizer decodes them, with nothing left out."""
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        found: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return found

    def after(self, before: int | None, token: int) -> str:
        """What a token without bytes of its own adds behind `before`, the token that it follows; None: it begins the text."""
        if before is None:
            return self.alone(token)
        key = self._end(before), token
        if key not in self._behind:
            self._behind[key] = self._beyond(before, token)
        return self._behind[key]

    def _beyond(self, before: int, token: int) -> str:
        return self.text([before, token])[len(self.alone(before)) :]

    def _read(self, token: int) -> bytes | None:
        if self.kind == "text":
            return None
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        name = tokenizer.convert_ids_to_tokens(token)
        if self.kind == "fallback":
            byte = self._bytes.get(name)
            return None if byte is None else bytes([byte])
        if name is None:
            return b""  # a row of the embedding without a token
        found = [self._bytes.get(character) for character in name]
        return name.encode() if None in found else bytes(byte for byte in found if byte is not None)


_kept: weakref.WeakKeyDictionary[Any, Pieces] = weakref.WeakKeyDictionary()


def pieces_of(tokenizer: Any) -> Pieces:
    """Those of a tokenizer, made once."""
    if tokenizer not in _kept:
        _kept[tokenizer] = Pieces(tokenizer)
    return _kept[tokenizer]


def _byte_level() -> dict[str, int]:
    """The characters that GPT-2's vocabulary writes bytes with."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}
