"""Which turns of a chat are learnt, in the tokens that an engine would have been given and would have written."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import render_prompt
from rondo.roles.data.turns import encode_turns

CHAT = DataConfig(path="unused", label=None, apply_chat_template=True, system="be")
STRIPS = (
    "{% for m in messages %}{{ m.role[0] }}{{ 'think' if m.role == 'assistant' and loop.last }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
"""Leaves out what a turn begins with once another one follows, as templates of models that think do."""


def chat(*weights: int | None) -> Row:
    messages: list[dict[str, Any]] = []
    for number, weight in enumerate(weights):
        messages.append({"role": "user", "content": f"s{number}"})
        answer = {"role": "assistant", "content": f"{number}{number}"}
        messages.append(answer if weight is None else answer | {"weight": weight})
    return Row("a.jsonl:1", messages, None, {})


def learnt(row: Row, turns: str) -> tuple[str, list[str]]:
    """The prompt, and each stretch of tokens behind it that is learnt."""
    tokenizer = build_tokenizer()
    shown, tokens, mask = encode_turns(tokenizer, row, CHAT, turns)
    found, open_ = list[list[int]](), False
    for token, on in zip(tokens.tolist(), mask.tolist(), strict=True):
        if on and not open_:
            found.append([])
        if on:
            found[-1].append(token)
        open_ = bool(on)
    return tokenizer.decode(render_prompt(tokenizer, shown, CHAT, 999)), [tokenizer.decode(part) for part in found]


def test_all_turns_of_the_assistant_are_learnt_up_to_their_ends_or_those_that_are_not_marked_otherwise() -> None:
    end = build_tokenizer().eos_token
    prompt, found = learnt(chat(None, None, None), "all")
    assert prompt.count("s0") == 1 and "s1" not in prompt and "be" in prompt
    assert found == [f"{n}{n}{end}" for n in range(3)]
    assert learnt(chat(0, 1, None), "marked")[1] == [f"{n}{n}{end}" for n in (1, 2)]
    assert "s1" in learnt(chat(0, 1, None), "marked")[0]
    assert learnt(chat(1, 0, 1), "marked")[1] == [f"{n}{n}{end}" for n in (0, 2)]
    assert learnt(chat(0, None), "all")[1] == [f"{n}{n}{end}" for n in range(2)]


def test_all_tokens_are_those_of_the_chat_as_the_template_writes_it_whole() -> None:
    tokenizer, row = build_tokenizer(), chat(None, None)
    shown, tokens, _ = encode_turns(tokenizer, row, CHAT, "all")
    whole = tokenizer.apply_chat_template([{"role": "system", "content": "be"}, *row.prompt], tokenize=False)
    made = [*render_prompt(tokenizer, shown, CHAT, 999).tolist(), *tokens.tolist()]
    assert tokenizer(whole, add_special_tokens=False)["input_ids"][: len(made)] == made


def test_a_chat_without_such_a_turn_is_refused_and_so_is_a_template_that_changes_what_came_before() -> None:
    with pytest.raises(RowError, match=r"^a.jsonl:1: a chat must have a turn of the assistant to learn, got none"):
        learnt(chat(0, 0), "marked")
    with pytest.raises(RowError, match="a chat must have a turn"):
        encode_turns(build_tokenizer(), Row("a", "text", None, {}), CHAT, "all")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = STRIPS
    assert len(encode_turns(tokenizer, chat(None), CHAT, "all")[1]) > 2
    with pytest.raises(RowError, match=r"what comes before message 4 the same with it and without.*'last'"):
        encode_turns(tokenizer, chat(None, None), CHAT, "all")
    media = Row(
        "b", [*chat(None).prompt, {"role": "user", "content": [{"type": "image"}]}, *chat(None).prompt[1:]], None, {}
    )  # type: ignore[misc]
    with pytest.raises(RowError, match="media must come before the first turn that is learnt"):
        encode_turns(build_tokenizer(), media, CHAT, "all")
