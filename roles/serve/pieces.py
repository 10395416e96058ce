"""Pieces: what each token of a tokenizer adds to a text, exactly, whatever its kind.

Owns the kinds. Owns no text (`text.py`). Three kinds are known, by what they make of the first byte of a long character:

    bytes       tokens are bytes (GPT-2, Llama-3, Qwen): what they say is put together and then read as UTF-8
    fallback    tokens are text, beside 256 of one byte each for what the vocabulary lacks (Llama-2, Mistral, Gemma)
    text        tokens are text alone (WordPiece, unigram)

Invariant: a piece depends on its token and on whether another stands before it, which is when decoders set spaces.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

REPLACEMENT = "\ufffd"
_FIRST = 0xF0
"""A byte that makes no character alone."""


class Pieces:
    """Of one tokenizer; `pieces_of` keeps them. `kind` is as above."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = weakref.ref(tokenizer)  # which these pieces must not keep alive, nor so themselves
        self.special = frozenset(
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        ) | frozenset(tokenizer.all_special_ids)
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of a token, at most."""
        self._raw: dict[int, bytes | None] = {}
        self._alone: dict[int, str] = {}
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

    def raw(self, token: int) -> bytes | None:
        """The bytes that a token stands for; None of one that stands for text."""
        if self.kind == "text":
            return None
        if token not in self._raw:
            self._raw[token] = self._read(token)
        return self._raw[token]

    def after(self, before: int | None, tokens: Sequence[int]) -> str:
        """What tokens without bytes of their own add behind `before`, the token that they follow; None: they begin the text."""
        if before is None:
            return self.text(tokens)
        return self.text([before, *tokens])[len(self.alone(before)) :]

    def alone(self, token: int) -> str:
        """The text of one token by itself."""
        if token not in self._alone:
            self._alone[token] = self.text([token])
        return self._alone[token]

    def _read(self, token: int) -> bytes | None:
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
