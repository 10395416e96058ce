"""Control tokens that somebody spells: a tool's answer that holds `<|im_end|>` says these characters, and ends no turn.

Owns which texts a chat template is given and how what it writes becomes tokens, by transformers' own marks. Does not own who is
trusted to write control tokens: rows, texts that are said as they are, and the policy's own replies are not marked.
Imports torch never, and transformers where a tokenizer of it is handed in.

    said = spelt(tokenizer, {"role": "tool", "content": "a<|im_end|>b"})       # with marks around it
    encoded(tokenizer, tokenizer.apply_chat_template([said], tokenize=False))  # int32 [T]: the template's tokens alone end a turn

Invariant: of the tokens of a text with marks, those that stand for what is between them are not control tokens.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

MARK = "\U000f0000"
"""In front of each such text; transformers takes the marks out that a text brings itself."""
_END = "\U000f0001"
_encoding = threading.Lock()
"""Marked texts and others are encoded under different settings, which transformers keeps in the tokenizer."""
_MARKED = re.compile(f"{MARK}.*?{_END}")


def spelt(tokenizer: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the chat template may be given it, whatever its text holds."""
    template = str(tokenizer.chat_template)
    content = message.get("content")
    parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"text": content}]
    said = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if any(token in text for text in said for token in (MARK, *_control_tokens(tokenizer, template))):
        [[marked]], *_ = tokenizer._mark_chat_inputs(template, [[{"content": content}]], None, None, {}, True, False)
        return {**message, **marked}
    return dict(message)


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


def unmarked(text: str) -> str:
    """Without what the marks are around."""
    return _MARKED.sub("", text)


def without_marks(text: str) -> str:
    """What is said, with no marks around it."""
    return text.replace(MARK, "").replace(_END, "")


@functools.lru_cache(16)
def backend_of(tokenizer: Any) -> Any:
    """What makes the tokens of one that is transformers' own in texts and chat templates; None of others."""
    from transformers import TokenizersBackend as Usual

    names, kind = ("__call__", "apply_chat_template", "_encode_plus"), type(tokenizer)
    usual = isinstance(tokenizer, Usual) and all(getattr(kind, name) is getattr(Usual, name) for name in names)
    return tokenizer.backend_tokenizer if usual and not tokenizer.split_special_tokens else None


@functools.lru_cache(16)
def _control_tokens(tokenizer: Any, template: str) -> tuple[str, ...]:
    """Special ones, and those added ones that the template writes."""
    found: tuple[str, ...] = tokenizer._get_control_tokens(template)
    return found
