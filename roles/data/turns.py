"""Chats of several turns as tokens: which of them the policy learns to write.

Owns where turns begin and end, and what is learnt of them. Does not own the prompt in front of the first of these, which is
rendered as any prompt (`prompts.py`, `media.py`).

    user   assistant   user   assistant      with turns="all"
    ------ 1111111111 ------ 1111111111      the prompt, and the mask of what follows it

Each turn is tokenized by itself, behind what an engine would have been given for it: a chat template must write what came before
a message the same whatever follows. One that does not (templates that leave out the thinking of earlier turns) is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import as_shown, has_media

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig


def encode_turns(tokenizer: Any, row: Row, config: DataConfig, turns: str) -> tuple[Row, np.ndarray, np.ndarray]:
    """(the row up to the first turn that is learnt, the tokens from there on, int32 [R], uint8 [R], 1 = learnt). A turn is learnt
    up to its end of sequence. turns: "all" of the assistant, or "marked", without those whose `weight` is 0. RowError for a chat
    without any, with media behind the first, or whose template changes what came before."""
    messages = [] if isinstance(row.prompt, str) else row.prompt
    weighed = [turns == "all" or bool(each.get("weight", 1)) for each in messages]
    answers = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
    learnt = [at for at in answers if at and weighed[at]]
    if not learnt:
        raise RowError(
            f"{row.name}: a chat must have a turn of the assistant to learn, got none. Correct or remove the row"
        )
    first, last = learnt[0], learnt[-1]
    if any(has_media(each) for each in messages[first:]):
        raise RowError(
            f"{row.name}: media must come before the first turn that is learnt, got some behind it. Set sft.turns to 'last'"
        )
    shown, args = as_shown(row, messages, config)
    behind = len(shown) - len(messages)

    def text(number: int, *, answers: bool) -> str:
        found = tokenizer.apply_chat_template(
            shown[: number + behind], tokenize=False, **args, add_generation_prompt=answers
        )
        return str(found)

    parts: list[tuple[str, bool]] = []
    try:
        before = text(first, answers=True)
        for at in (each for each in answers if first <= each <= last):
            begun, ended = text(at, answers=True), text(at + 1, answers=False)
            if not (begun.startswith(before) and ended.startswith(begun)):
                raise RowError(
                    f"{row.name}: the chat template must write what comes before message {at + 1} the same with it and without, "
                    "got another text. Set sft.turns to 'last', or give the tokenizer a template that only adds"
                )
            parts += [(begun[len(before) :], False), (ended[len(begun) :], at in learnt)]
            before = ended
    except RowError:
        raise
    except Exception as error:  # a template raises whatever its code and the row's values lead to
        raise RowError(
            f"{row.name}: prompt must suit the chat template, got {type(error).__name__}: {error}. Correct or remove the row"
        ) from error
    tokens, masks, end = list[int](), list[int](), tokenizer.eos_token_id
    for part, is_learnt in parts:
        made = tokenizer(part, add_special_tokens=False)["input_ids"]
        ends = len(made) - made[::-1].index(end) if end in made else len(made)
        tokens += made
        masks += [int(is_learnt and place < ends) for place in range(len(made))]
    while masks and not masks[-1]:  # what a template writes behind the last end
        del tokens[-1], masks[-1]
    return replace(row, prompt=messages[:first]), np.asarray(tokens, np.int32), np.asarray(masks, np.uint8)
