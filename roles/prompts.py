"""Prompts: from a row to the tokens that the engine starts from.

Owns rendering (plain text or the tokenizer's chat template) and the length limit. Does not own tokenizers, rows, or prompts
with media, which the model's processor renders (`media.py`).
Imports neither torch nor transformers: the tokenizer is handed in.

    render_prompt(tokenizer, Row("row 0", "s3142>", "1234", {}), config.data, max_tokens=64) -> int32 [T]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.roles.datasets import Row, RowError

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig


def render_prompt(
    tokenizer: Any, row: Row, config: DataConfig, max_tokens: int, *, setting: str = "rollout.max_prompt_tokens"
) -> np.ndarray:
    """The prompt's tokens, int32 [T] with 1 <= T <= max_tokens.

    Raises RowError for a prompt that is too long, empty, or of the wrong kind: one bad row must not stop a run, so
    whoever asks counts it against this prompt only.
    """
    plain = isinstance(row.prompt, str) and not config.apply_chat_template
    messages = None if plain else messages_of(row, config)
    try:
        if plain:
            tokens = tokenizer(row.prompt)["input_ids"]
        else:
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **config.chat_template_args
            )
    except Exception as error:  # a template raises whatever its code and the row's values lead to
        suits = "the tokenizer" if plain else "the chat template"
        raise RowError(
            f"{row.name}: prompt must suit {suits}, got {type(error).__name__}: {error}. Correct or remove the row"
        ) from error
    check_length(row, len(tokens), max_tokens, setting)
    return np.asarray(tokens, dtype=np.int32)


def messages_of(row: Row, config: DataConfig) -> list[dict[str, Any]]:
    """The prompt as messages for the chat template. RowError without `apply_chat_template`."""
    if not config.apply_chat_template:
        kind = "text" if isinstance(row.prompt, str) else "a list of messages"
        raise RowError(
            f"{row.name}: prompt must be text without data.apply_chat_template, got {kind}{' with media' if row.media else ''}. "
            "Set data.apply_chat_template to True"
        )
    return [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt


def check_length(row: Row, num_tokens: int, max_tokens: int, setting: str) -> None:
    """RowError for a prompt without tokens, or with more than `max_tokens`, which `setting` limits."""
    if not 1 <= num_tokens <= max_tokens:
        media = " with its media" if row.media else ""
        way = "lower the token limits in media" if row.media else "shorten"
        raise RowError(
            f"{row.name}: prompt must have 1 to {max_tokens} tokens{media}, got {num_tokens}. "
            f"Raise {setting}, or {way} or remove the row"
        )


def encode_answer(tokenizer: Any, row: Row) -> np.ndarray:
    """A demonstration's answer (`row.label`) and the end of sequence, int32 [R]: what the policy learns to write."""
    if not isinstance(row.label, str) or not row.label:
        raise RowError(f"{row.name}: answer must be text, got {row.label!r}. Correct or remove the row")
    if tokenizer.eos_token_id is None:
        raise RowError(
            f"{row.name}: the tokenizer must have an end of sequence to learn to stop, got none. Set eos_token"
        )
    tokens = tokenizer(row.label, add_special_tokens=False)["input_ids"]
    return np.asarray([*tokens, tokenizer.eos_token_id], dtype=np.int32)
