"""Control tokens that somebody spells: a tool's answer that holds `<|im_end|>` says these characters, and ends no turn.

Owns which texts a chat template is given and how what it writes becomes tokens, by transformers' own marks. Does not own who is
trusted to write control tokens: rows, texts that are said as they are, and the policy's own replies are not marked.
Imports torch never, and transformers where a tokenizer of it is handed in.

    said = spelt(tokenizer, {"role": "tool", "content": "a<|im_end|>b"})       # with marks around the token
    encoded(tokenizer, tokenizer.apply_chat_template([said], tokenize=False))  # int32 [T]: the template's tokens alone end a turn

Invariant: of the tokens of a text with marks, those that stand for what is between them are not control tokens.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MARK = "\U000f0000"
"""In front of each such text; marks that a text brings itself are taken out."""
_END = "\U000f0001"
_encoding = threading.Lock()
"""Marked texts and others are encoded under different settings, which transformers keeps in the tokenizer."""
_MARKED, _SPELT = re.compile(f"{MARK}.*?{_END}"), f"{MARK}\\g<0>{_END}"


def spelt(tokenizer: Any, said: Any) -> Any:
    """A message, a tool's schema, or what else of JSON somebody says, as the chat template may be given it, whatever its texts
    and its names of fields hold."""
    return _marked(said, control_tokens(tokenizer, str(tokenizer.chat_template)))


def _marked(said: Any, tokens: re.Pattern[str]) -> Any:
    if isinstance(said, str):
        said = without_marks(said)
        return tokens.sub(_SPELT, said) if tokens.search(said) else said  # a tenth of the time where there is none
    if isinstance(said, (list, tuple)):
        return [_marked(each, tokens) for each in said]
    if isinstance(said, (dict, Mapping)):  # a dict is known for one in less time
        return {_marked(name, tokens): _marked(each, tokens) for name, each in said.items()}
    return said


def encoded(tokenizer: Any, text: str) -> np.ndarray:
    """int32 [T] of what a template has written."""
    with _encoding:
        if MARK in text:
            tokens = tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)["input_ids"]
        elif (backend := backend_of(tokenizer)) is None or backend.encode_special_tokens or backend.truncation:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:  # the same, in a third of the time
            tokens = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return np.array(tokens, np.int32)


def encoded_behind(tokenizer: Any, text: str) -> np.ndarray:
    """int32 [T] of what a template has written behind something else: without the space that some tokenizers set in front of a
    text of its own."""
    if _sets_space(tokenizer):
        line, both = encoded(tokenizer, "\n"), encoded(tokenizer, "\n" + text)
        if np.array_equal(both[: len(line)], line):
            return both[len(line) :]
    return encoded(tokenizer, text)


def decoded(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of some tokens, as the tokenizer decodes them."""
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", True)
    backend = None if cleans else backend_of(tokenizer)  # the same, in half the time
    decode = tokenizer.decode if backend is None else backend.decode
    return str(decode(tokens, skip_special_tokens=skip_special_tokens))


def unmarked(text: str) -> str:
    """Without what the marks are around."""
    return _MARKED.sub("", text)


def without_marks(text: str) -> str:
    """What is said, with no marks around it."""
    return text.replace(MARK, "").replace(_END, "")


@functools.lru_cache(16)
def backend_of(tokenizer: Any) -> Any:
    """What makes tokens of texts, and texts of tokens, where all of it and chat templates are transformers' own; else None."""
    from transformers import TokenizersBackend as Usual

    names, kind = ("__call__", "apply_chat_template", "_encode_plus", "decode", "_decode"), type(tokenizer)
    usual = isinstance(tokenizer, Usual) and all(getattr(kind, name) is getattr(Usual, name) for name in names)
    return tokenizer.backend_tokenizer if usual and not tokenizer.split_special_tokens else None


@functools.lru_cache(16)
def _sets_space(tokenizer: Any) -> bool:
    line, both = encoded(tokenizer, "\n"), encoded(tokenizer, "\na")
    return not np.array_equal(both[len(line) :], encoded(tokenizer, "a"))


@functools.lru_cache(16)
def control_tokens(tokenizer: Any, template: str) -> re.Pattern[str]:
    """Return a pattern of the control tokens: special ones, and those added ones that the template writes; of two at one place
    the longer."""
    found = sorted(tokenizer._get_control_tokens(template), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found)) or "(?!)")
