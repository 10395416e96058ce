"""Prompts: from a row to the tokens that the engine starts from.

Owns rendering (plain text or the tokenizer's chat template), the length limit and what becomes of a row beyond it. Does not own
tokenizers, rows, answers (`turns.py`), or prompts with media, which the model's processor renders (`media.py`).
Imports neither torch nor transformers: the tokenizer is handed in.

    render_prompt(tokenizer, Row("row 0", "s3142>", "1234", {}), config.data, max_tokens=64) -> int32 [T]

Invariant: warm-up, reinforcement, evaluation and check make a row's prompt here, or in `media.py` with the same messages,
arguments and limit; so they see the same tokens and leave out the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.models.chat_template import left_out
from rondo.roles.data.datasets import Row, RowError
from rondo.runtime.errors import Fatal

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig


_SURELY_SHORT = 64
"""Characters a token. A prompt of more is first compared with the longest token: one of megabytes would take the tokenizer many
seconds, only to be left out."""


class TooLong(RowError):
    """A row of `num_tokens`, beyond the limit, which is to be left out."""

    def __init__(self, text: str, num_tokens: int) -> None:
        super().__init__(text)
        self.num_tokens = num_tokens


def render_prompt(
    tokenizer: Any, row: Row, config: DataConfig, max_tokens: int, *, setting: str = "rollout.max_prompt_tokens"
) -> np.ndarray:
    """The prompt's tokens, int32 [T] with 1 <= T <= max_tokens; the last ones where a long prompt is to be cut.

    Takes as long as the tokenizer does: not for an event loop. One that is longer than so many tokens can be is not tokenized.
    Raises RowError for a prompt that is too long (TooLong), empty, or of the wrong kind: one bad row must not stop a run, so
    whoever asks counts it against this prompt only. Fatal where the settings want a prompt that is too long to end the run.
    """
    plain = isinstance(row.prompt, str) and not config.apply_chat_template
    messages = None if plain else messages_of(row, config)
    tokens: Any = None
    try:
        text: Any = row.prompt
        if messages is not None:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **template_args(row, config))
            added = len(messages) - (1 if isinstance(row.prompt, str) else len(row.prompt))
            refuse_left_out(tokenizer, row, messages, template_args(row, config), added)
        least = 0 if config.too_long == "truncate" else _least_tokens(tokenizer, text, max_tokens)
        if least <= max_tokens:
            tokens = tokenizer(text, add_special_tokens=plain)["input_ids"]
    except RowError:
        raise
    except Exception as error:  # a template raises whatever its code and the row's values lead to
        suits = "the tokenizer" if plain else "the chat template"
        raise RowError(
            f"{row.name}: prompt must suit {suits}, got {type(error).__name__}: {error}. Correct or remove the row"
        ) from error
    if tokens is None:
        check_length(row, least, max_tokens, setting, config, at_least=True)
    if len(tokens) > max_tokens and config.too_long == "truncate":
        tokens = tokens[-max_tokens:]
    check_length(row, len(tokens), max_tokens, setting, config)
    return np.asarray(tokens, dtype=np.int32)


def _least_tokens(tokenizer: Any, text: str, max_tokens: int) -> int:
    """A text has no fewer tokens: as many as it would of the longest of the vocabulary. 0 where that is not worth a look."""
    if len(text) <= _SURELY_SHORT * max_tokens:
        return 0
    return -(-len(text) // max(map(len, tokenizer.get_vocab())))


def messages_of(row: Row, config: DataConfig) -> list[dict[str, Any]]:
    """The prompt as messages for the chat template. RowError without `apply_chat_template`, and for one that the policy is not
    to answer."""
    if not config.apply_chat_template:
        kind = "text" if isinstance(row.prompt, str) else "a list of messages"
        raise RowError(
            f"{row.name}: prompt must be text without data.apply_chat_template, got {kind}{' with media' if row.media else ''}. "
            "Set data.apply_chat_template to True"
        )
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    args = config.chat_template_args
    if messages[-1]["role"] == "assistant" and args.get("add_generation_prompt", not continues(config)):
        raise RowError(
            f"{row.name}: prompt must end with a message for the assistant to answer, got one of the assistant. Set "
            "data.chat_template_args to {'continue_final_message': True} to have it continued, or remove the message"
        )
    return _shown(row, messages, config)


def _shown(row: Row, messages: list[dict[str, Any]], config: DataConfig) -> list[dict[str, Any]]:
    if config.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    return messages if row.media else [of_text(message) for message in messages]


def as_shown(
    row: Row, messages: list[dict[str, Any]], config: DataConfig
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A whole chat as the chat template is given it, and what it is given beside, but for whether somebody is to answer."""
    args = template_args(row, config)
    return _shown(row, messages, config), {
        name: value for name, value in args.items() if name not in ("add_generation_prompt", "continue_final_message")
    }


def template_args(row: Row, config: DataConfig) -> dict[str, Any]:
    """What the chat template is given beside the messages of the row."""
    args = dict(config.chat_template_args)
    if row.tools:
        args["tools"] = list(row.tools)
    if not continues(config):
        return {"add_generation_prompt": True, **args}
    ends = not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant"
    return {**args, "continue_final_message": ends, "add_generation_prompt": not ends}


def check_length(
    row: Row, num_tokens: int, max_tokens: int, setting: str, config: DataConfig, *, at_least: bool = False
) -> None:
    """RowError for a prompt without tokens, TooLong or Fatal for one with more than `max_tokens`, which `setting` limits."""
    if not 1 <= num_tokens <= max_tokens:
        media = " with its media" if row.media else ""
        way = "lower the token limits in media" if row.media else "shorten"
        text = (
            f"{row.name}: prompt must have 1 to {max_tokens} tokens{media}, got {'at least ' if at_least else ''}{num_tokens}. "
            f"Raise {setting}, or {way} or remove the row"
        )
        raise _beyond(text, num_tokens, config) if num_tokens else RowError(text)


def without_media_section(row: Row) -> RowError:
    """The error for a row with media in a job without settings of media."""
    return RowError(
        f"{row.name}: prompt must be text without the media section, got {row.media[0]}. Set media=MediaConfig()"
    )


def check_demonstration(
    row: Row, prompt: np.ndarray, answer: np.ndarray, max_tokens: int, config: DataConfig, place: str = "sft"
) -> None:
    """TooLong or Fatal for a demonstration with more than `max_tokens`, which the settings at `place` limit."""
    if len(prompt) + len(answer) > max_tokens:
        raise _beyond(
            f"{row.name}: prompt and answer must have at most {max_tokens} tokens, got {len(prompt)} + {len(answer)}. "
            f"Raise {place}.micro_batch_tokens, or shorten or remove the row",
            len(prompt) + len(answer),
            config,
        )


def refuse_left_out(
    tokenizer: Any,
    row: Row,
    messages: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    added: int = 0,
    whole: int | None = None,
) -> None:
    """RowError for a chat of which the chat template leaves out a tool, a message or calls; of the message at `whole`, anything.
    `added`: messages in front that are not of the row."""
    if (words := left_out(tokenizer, messages, added=added, whole=whole, **args)) is not None:
        raise RowError(
            f"{row.name}: the chat template must write all of the chat, got one that leaves out {words}. Set data.message_roles, "
            "correct or remove the row, or give the tokenizer another template"
        )


def continues(config: DataConfig) -> bool:
    """Return whether a prompt that ends with a message of the assistant is continued."""
    return bool(config.chat_template_args.get("continue_final_message"))


def _beyond(text: str, num_tokens: int, config: DataConfig) -> RowError | Fatal:
    if config.too_long == "error":
        return Fatal(f"{text}; or set data.too_long to 'drop'")
    return TooLong(text, num_tokens)


def has_media(message: Mapping[str, Any]) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(part.get("type") != "text" for part in parts)


def of_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with parts of text alone as one text, which every template takes."""
    parts = message.get("content")
    if not isinstance(parts, list) or has_media(message):
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in parts)}
