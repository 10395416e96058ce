"""Prompts as the engine gets them: plain or through the chat template, int32, within their limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import TooLong, render_prompt
from rondo.runtime.errors import Fatal

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


def chat(**options: Any) -> DataConfig:
    return DataConfig(path="unused", apply_chat_template=True, **options)


QUESTION = {"role": "user", "content": "hello"}
PREFIX = {"role": "assistant", "content": "Well,"}


def test_a_system_message_comes_before_prompts_that_have_none(tokenizer: Any) -> None:
    start = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n"
    for prompt in ("hello", [QUESTION]):
        found = tokenizer.decode(render_prompt(tokenizer, row(prompt), chat(system="Be short."), 64))
        assert found.startswith(start)
    own = [{"role": "system", "content": "Be long."}, QUESTION]
    assert "short" not in tokenizer.decode(render_prompt(tokenizer, row(own), chat(system="Be short."), 80))


def test_parts_of_text_are_one_text_for_every_template(tokenizer: Any) -> None:
    copy = build_tokenizer()
    copy.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"  # a list would be its repr
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert copy.decode(render_prompt(copy, row([{"role": "user", "content": parts}]), CHAT, 64)) == "hello"


def test_a_prefix_of_the_assistants_is_continued_or_refused_and_never_closed_unasked(tokenizer: Any) -> None:
    opened = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    continues = chat(chat_template_args={"continue_final_message": True})
    both = [[QUESTION, PREFIX], [QUESTION]]
    found = [tokenizer.decode(render_prompt(tokenizer, row(prompt), continues, 80)) for prompt in both]
    assert found == [f"{opened}Well,", opened]
    with pytest.raises(RowError) as raised:
        render_prompt(tokenizer, row([QUESTION, PREFIX]), CHAT, 80)
    assert str(raised.value) == (
        "data.jsonl:3: prompt must end with a message for the assistant to answer, got one of the assistant. Set "
        "data.chat_template_args to {'continue_final_message': True} to have it continued, or remove the message"
    )
    closed = chat(chat_template_args={"add_generation_prompt": False})
    text = tokenizer.decode(render_prompt(tokenizer, row([QUESTION, PREFIX]), closed, 80))
    assert text == f"{opened}Well,<|im_end|>\n"


def test_tools_reach_the_template(tokenizer: Any) -> None:
    copy = build_tokenizer()
    copy.chat_template = "{{ tools[0].function.name }}: {{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = render_prompt(copy, replace(row("hello"), tools=tools), CHAT, 64)
    assert copy.decode(found) == "add: hello"


def test_a_prompt_beyond_the_limit_is_left_out_cut_at_its_beginning_or_ends_the_run(tokenizer: Any) -> None:
    plain = {way: DataConfig(path="unused", too_long=way) for way in ("drop", "error", "truncate")}
    with pytest.raises(TooLong) as raised:
        render_prompt(tokenizer, row("123456789"), plain["drop"], 8)
    assert raised.value.num_tokens == 9
    with pytest.raises(Fatal, match=r"^data.jsonl:3: prompt must have 1 to 8 tokens, got 9.*set data.too_long"):
        render_prompt(tokenizer, row("123456789"), plain["error"], 8)
    assert tokenizer.decode(render_prompt(tokenizer, row("123456789"), plain["truncate"], 8)) == "23456789"
    assert tokenizer.decode(render_prompt(tokenizer, row("12345678"), plain["truncate"], 8)) == "12345678"
    with pytest.raises(RowError, match="got 0"):
        render_prompt(tokenizer, row(""), plain["truncate"], 8)


def test_a_prompt_longer_than_its_tokens_can_be_is_not_tokenized() -> None:
    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner, self.asked = inner, 0

        def __call__(self, text: str, **kwargs: Any) -> Any:
            self.asked += 1
            return self.inner(text, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    counting = Counting(build_tokenizer())  # its longest token has 16 characters
    for config in (PLAIN, CHAT):
        with pytest.raises(TooLong, match="must have 1 to 8 tokens, got at least 6") as raised:
            render_prompt(counting, row("x" * 10_000), config, 8)
        assert raised.value.num_tokens in range(625, 650) and counting.asked == 0
    with pytest.raises(TooLong, match="got 512"):
        render_prompt(counting, row("x" * 512), PLAIN, 8)  # not worth a look
    cut = PLAIN.model_copy(update={"too_long": "truncate"})
    assert len(render_prompt(counting, row("x" * 10_000), cut, 8)) == 8 and counting.asked == 2
