"""What is learnt of a chat: the tokens that the chat template writes for a turn of the assistant, up to the one that ends it.

Owns which tokens these are, for demonstrations, for both sides of a pair and for answers that a reward model scores. Does not own
the prompt in front of the first turn, which is rendered as any prompt (`prompts.py`, `media.py`).

    user   assistant <end>  user   assistant <end>       with turns="all"
    ------ 111111111 1111   ------ 111111111 1111        the prompt, and the mask of what follows it

A turn is what the template adds to the text that an engine would have been given for it, and is tokenized by itself, so training
sees the tokens that sampling would have made. What the template writes behind the end of a turn is context of later ones.

Templates that open a thought for the policy may write earlier turns without one, and drop the thought of an answer. Then the
prompt of an answer without a thought ends before the thought; an answer with a thought is learnt as it lies, up to the end that
the template writes. A template that changes what came before a turn in any other way is refused, with its row and message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.models.chat_template import REASONING, end_of_turn
from rondo.models.control_tokens import encoded_behind
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import (
    as_shown,
    continues,
    has_media,
    messages_of,
    of_text,
    refuse_left_out,
    template_args,
)

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

_OPENED = re.compile(r"<think>\s*(</think>\s*)?\Z")
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*)</think>", re.DOTALL)
_DOUBLED = re.compile(r"\A(\s*<think>\s*)<think>\s*")
"""What opens a thought that is opened already."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The learnt turns of a chat. `row` is the chat in front of the first one, `tokens` int32 [R] follow its prompt, of which
    `mask` uint8 [R] is 1 where they are learnt. `unwritten`, int32, are tokens that end the prompt and are not in front of the
    first turn: a thought that the template opens for the policy, and not for this turn."""

    row: Row
    tokens: np.ndarray
    mask: np.ndarray
    unwritten: np.ndarray

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        """Return the prompt, int32 [T], without `unwritten`."""
        end = len(tokens) - len(self.unwritten)
        if end < 1 or not np.array_equal(tokens[end:], self.unwritten):
            raise RowError(
                f"{self.row.name}: the prompt must end with the thought that the chat template opens, got other tokens. Write a "
                "thought in front of the answer, or set a chat template that opens none"
            )
        return tokens[:end]


def without_answer(row: Row, config: DataConfig) -> tuple[Row, Any]:
    """Return a row without its answer, and the answer: the label, or without a column for it the last message of the chat as a
    list, where that is the assistant's."""
    if config.label is None and not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant":
        return replace(row, prompt=row.prompt[:-1]), row.prompt[-1:]
    return row, row.label


def encode_turns(tokenizer: Any, row: Row, config: DataConfig, turns: str) -> Turns:
    """Return what is learnt of a row. turns: "last" for its answer, "all" for each turn of the assistant, "marked" for those
    whose `weight` is not 0. RowError for a row without any, with media behind the first, or that the template does not write
    whole."""
    if turns == "last":
        return encode_answer(tokenizer, *without_answer(row, config), config)
    messages = [] if isinstance(row.prompt, str) else row.prompt
    weighed = [turns == "all" or bool(message.get("weight", 1)) for message in messages]
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = [at for at in answers if at and weighed[at]]
    if not learnt:
        raise RowError(
            f"{row.name}: a chat must have a turn of the assistant to learn, got none. Correct or remove the row"
        )
    if empty := [at + 1 for at in learnt if not _says(messages[at])]:
        raise RowError(f"{row.name}: answer must be text, got '' in message {empty[0]}. Correct or remove the row")
    return _encoded(tokenizer, replace(row, prompt=messages[: learnt[0]]), config, messages, learnt)


def encode_answer(tokenizer: Any, row: Row, answer: Any, config: DataConfig, *, may_be_empty: bool = False) -> Turns:
    """Return what is learnt of an answer to the prompt of a row: text, a message of the assistant in a list, or the whole chat.
    RowError as `encode_turns`."""
    begins = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    message = {"role": "assistant", "content": answer}
    if isinstance(answer, list) and answer:
        message = answer[-1] if isinstance(answer[-1], dict) else {}
        if message.get("role") != "assistant" or (len(answer) > 1 and answer[:-1] != begins):
            raise RowError(
                f"{row.name}: an answer must be text, a message of the assistant, or the prompt with one behind it, got another "
                "chat. Correct or remove the row"
            )
    if not row.prompt or not (_says(message) or (may_be_empty and isinstance(answer, str))):
        raise RowError(f"{row.name}: answer must be text, got {message.get('content')!r}. Correct or remove the row")
    if isinstance(row.prompt, str) and not config.apply_chat_template:
        if message.keys() - {"role", "content", "weight"} or not isinstance(message["content"], str):
            raise RowError(
                f"{row.name}: answer must be text without data.apply_chat_template, got a message with "
                f"{', '.join(message)}. Set data.apply_chat_template to True"
            )
        tokens = np.append(encoded_behind(tokenizer, message["content"]), _end_of_sequence(tokenizer, row))
        return Turns(row, tokens.astype(np.int32), np.ones(len(tokens), np.uint8), tokens[:0])
    if begins[-1]["role"] == "assistant" and continues(config):
        begun, message = of_text(begins.pop()), of_text(message)
        message["content"] = begun["content"] + message["content"]
    return _encoded(tokenizer, row, config, [*begins, message], [len(begins)])


def _says(message: Mapping[str, Any]) -> bool:
    """Whether an answer has something to learn."""
    content = message.get("content")
    return bool(message.get("tool_calls") or any(message.get(name) for name in REASONING)) or (
        bool(content.strip()) if isinstance(content, str) else isinstance(content, list) and bool(content)
    )


def _encoded(
    tokenizer: Any, row: Row, config: DataConfig, messages: list[dict[str, Any]], learnt: Sequence[int]
) -> Turns:
    """Return the turns at the places `learnt`, behind the prompt of `row`."""
    if any(has_media(message) for message in messages[learnt[0] :]):
        raise RowError(
            f"{row.name}: media must come before the first turn that is learnt, got some behind it. Set sft.turns to 'last'"
        )
    before, unwritten, tokens, mask = "", "", list[np.ndarray](), list[np.ndarray]()
    for at in learnt:
        asked, context, written, ends = _turn(tokenizer, row, config, messages[: at + 1], first=at == learnt[0])
        if not context.startswith(before):
            raise _refused(row, messages[: at + 1], "write what comes before it as without it, got another text")
        if at == learnt[0]:
            unwritten = asked[len(context) :]
        else:
            tokens.append(encoded_behind(tokenizer, context[len(before) :]))
            mask.append(np.zeros(len(tokens[-1]), np.uint8))
        tokens.append(encoded_behind(tokenizer, written))
        if not ends and at == learnt[-1]:
            tokens.append(np.array([_end_of_sequence(tokenizer, row)]))
        elif not ends:
            raise _refused(row, messages[: at + 1], "write a control token that ends it, got none")
        mask.append(np.ones(sum(map(len, tokens)) - sum(map(len, mask)), np.uint8))
        before = context + written
    flat = np.concatenate(tokens).astype(np.int32)
    return Turns(row, flat, np.concatenate(mask), encoded_behind(tokenizer, unwritten))


def _turn(
    tokenizer: Any, row: Row, config: DataConfig, messages: list[dict[str, Any]], *, first: bool
) -> tuple[str, str, str, bool]:
    """Return (what an engine would be given for the last of the messages, what the template writes in front of that one, the turn
    up to its end, whether a control token ends it). Behind the prompt of `row` where it is the `first`."""
    shown, args = as_shown(row, messages, config)
    before = shown[:-1], {"add_generation_prompt": True, **template_args(row, config), "continue_final_message": False}
    if first:
        before = messages_of(row, config), template_args(row, config)
    try:
        asked = str(tokenizer.apply_chat_template(before[0], tokenize=False, **before[1]))
        whole = str(tokenizer.apply_chat_template(shown, tokenize=False, **args))
    except Exception as error:  # a template raises whatever its code and the row's values lead to
        raise RowError(
            f"{row.name}: prompt must suit the chat template, got {type(error).__name__}: {error}. Correct or remove the row"
        ) from error
    content = shown[-1].get("content")
    found = _THOUGHT.match(content) if isinstance(content, str) else None
    thought = "" if found is None else found[1].strip()
    if thought and any(messages[-1].get(name) for name in REASONING):
        raise _refused(row, messages, "be given one thought, got one in its content and one beside it")
    refuse_left_out(tokenizer, row, shown, args, len(shown) - len(messages), whole=len(shown) - 1)
    opened = _OPENED.search(asked)
    opens, without = opened is not None and not opened[1], asked if opened is None else asked[: opened.start()]
    context = next((text for text in (asked, without) if whole.startswith(text)), None)
    if context is None:
        raise _refused(row, messages, "write it behind the generation prompt, got another text")
    text = whole[len(context) :]
    end = end_of_turn(tokenizer, text)
    start, stop = end or (len(text.rstrip()),) * 2
    written, ending = text[:start], text[start:stop]
    if thought not in written:
        if messages[-1].get("tool_calls"):
            raise _refused(row, messages, "write the thought in front of its calls, got none")
        context, written = asked if opens else without, str(content).strip()  # it is learnt as it lies
    begin = context[len(without) :] if opens else ""
    written = _DOUBLED.sub(r"\1", begin + written)[len(begin) :]
    return asked, context, written + ending, end is not None


def _refused(row: Row, messages: Sequence[Any], rule: str) -> RowError:
    return RowError(
        f"{row.name}: for message {len(messages)} the chat template must {rule}. Correct or remove the row, give the tokenizer "
        "another template, or set sft.turns to 'last'"
    )


def _end_of_sequence(tokenizer: Any, row: Row) -> int:
    if tokenizer.eos_token_id is None:
        raise RowError(
            f"{row.name}: the tokenizer must have an end of sequence to learn to stop, got none. Set eos_token"
        )
    return int(tokenizer.eos_token_id)
