"""Prompts: from a row to the tokens that the engine starts from.

Owns rendering (plain text or the tokenizer's chat template) and the length limit. Does not own tokenizers or rows.
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
    if config.apply_chat_template:
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        tokens = _through_template(tokenizer, row, messages, config.chat_template_args)
    elif isinstance(row.prompt, str):
        tokens = tokenizer(row.prompt)["input_ids"]
    else:
        raise RowError(
            f"{row.name}: prompt must be text without data.apply_chat_template, got a list of messages. "
            "Set data.apply_chat_template to True"
        )
    if not 1 <= len(tokens) <= max_tokens:
        raise RowError(
            f"{row.name}: prompt must have 1 to {max_tokens} tokens, got {len(tokens)}. "
            f"Raise {setting}, or shorten or remove the row"
        )
    return np.asarray(tokens, dtype=np.int32)


def _through_template(tokenizer: Any, row: Row, messages: Any, arguments: dict[str, Any]) -> list[int]:
    from jinja2 import TemplateError

    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
        )
    except TemplateError as error:
        raise RowError(f"{row.name}: prompt must suit the chat template, got {error}. Correct the row") from error
    return tokens


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
