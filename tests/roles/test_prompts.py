"""Prompts as the engine gets them: plain or through the chat template, int32, within their limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig
from rondo.roles.datasets import Row, RowError
from rondo.roles.prompts import encode_answer, render_prompt

PLAIN = DataConfig(path="unused")
CHAT = DataConfig(path="unused", apply_chat_template=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def row(prompt: Any, label: Any = None) -> Row:
    return Row("data.jsonl:3", prompt, label, {})


def test_a_plain_prompt_is_its_text(tokenizer: Any) -> None:
    tokens = render_prompt(tokenizer, row("s31>"), PLAIN, 8)
    assert tokens.dtype == np.int32 and tokens.shape == (4,)
    assert tokenizer.decode(tokens) == "s31>"


def test_text_and_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    text = render_prompt(tokenizer, row("hello"), CHAT, 64)
    messages = render_prompt(tokenizer, row([{"role": "user", "content": "hello"}]), CHAT, 64)
    assert tokenizer.decode(text) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert text.tolist() == messages.tolist()


def test_arguments_reach_the_chat_template(tokenizer: Any) -> None:
    copy = build_tokenizer()
    copy.chat_template = "{{ style }}: {{ messages[0].content }}"
    config = DataConfig(path="unused", apply_chat_template=True, chat_template_args={"style": "short"})
    assert copy.decode(render_prompt(copy, row("hello"), config, 64)) == "short: hello"


def test_what_the_chat_template_refuses_is_an_error_of_the_row(tokenizer: Any) -> None:
    copy = build_tokenizer()
    copy.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        RowError, match=r"3: prompt must suit the chat template, got TemplateError: roles must alternate"
    ):
        render_prompt(copy, row("hello"), CHAT, 64)


def test_whatever_a_template_or_tokenizer_raises_is_an_error_of_the_row(tokenizer: Any) -> None:
    copy = build_tokenizer()
    copy.chat_template = "{% for message in messages %}{{ '<' + message.content + '>' }}{% endfor %}"
    with pytest.raises(RowError, match=r"data.jsonl:3: prompt must suit the chat template, got TypeError: "):
        render_prompt(copy, row([{"role": "user", "content": 5}]), CHAT, 64)
    with pytest.raises(RowError, match=r"data.jsonl:3: prompt must suit the tokenizer, got "):
        render_prompt(copy, row("\ud800"), PLAIN, 64)


def test_messages_need_the_chat_template(tokenizer: Any) -> None:
    with pytest.raises(RowError, match=r"data.jsonl:3: prompt must be text without data.apply_chat_template"):
        render_prompt(tokenizer, row([{"role": "user", "content": "hello"}]), PLAIN, 64)


@pytest.mark.parametrize(("text", "length"), [("", 0), ("123456789", 9)])
def test_a_prompt_outside_its_limits_is_an_error_of_the_row(tokenizer: Any, text: str, length: int) -> None:
    with pytest.raises(RowError) as raised:
        render_prompt(tokenizer, row(text), PLAIN, 8)
    assert str(raised.value) == (
        f"data.jsonl:3: prompt must have 1 to 8 tokens, got {length}. "
        "Raise rollout.max_prompt_tokens, or shorten or remove the row"
    )


def test_an_answer_ends_with_the_end_of_sequence(tokenizer: Any) -> None:
    tokens = encode_answer(tokenizer, row("s31>", "13"))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*tokenizer("13")["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("label", [None, "", 13])
def test_an_answer_that_is_no_text_is_refused(tokenizer: Any, label: Any) -> None:
    with pytest.raises(RowError, match=r"data.jsonl:3: answer must be text"):
        encode_answer(tokenizer, row("s31>", label))
