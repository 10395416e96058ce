"""What chat templates of published families do between two turns: which go on behind what is there, and which rewrite it."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig
from rondo.roles.data.chat import Chat, Message, rewrites
from rondo.roles.data.datasets import Row, RowError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
_ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
)
_CALLS = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"

QWEN3 = (
    _THOUGHTS + "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set text = m.content or '' %}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}"
    + _CALLS + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}" + _ASKS
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
"""Thoughts of earlier replies go once a user speaks; without thinking an empty one stands before the last reply alone. What
tools say is one message of a user."""
QWEN3_OPENS = QWEN3.replace("assistant\n{% if enable", "assistant\n<think>\n{% if enable")
"""Of the models that always think: the prompt begins the thoughts."""
QWEN25 = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_end|>\n{% for m in messages %}"
    "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}" + _ASKS + "{% endif %}"
)  # fmt: skip
"""A system prompt of its own where there is none."""
MISTRAL = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{% if tools and loop.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ m.content }}"
    "[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Tools stand before the last user's words, and nobody but users and assistants speaks, in turns."""
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}<E>"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
"""No reply keeps its thoughts, whoever speaks next."""
ZEPHYR = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Leaves out who else speaks."""


def chat(template: str, *, tools: bool = False, begin: list[Message] | None = None, **args: Any) -> Chat:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    row = Row("row 9", [dict(each) for each in begin or [said("user", "2+2?")]], None, {}, tools=TOOLS if tools else ())
    found = Chat.of(tokenizer, row, DataConfig(path="x", apply_chat_template=True, chat_template_args=args))
    assert found is not None
    return found


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def after(reply: str, role: str) -> str:
    return f"a reply{reply} that a message of role {role!r} follows"


THOUGHT = " with thoughts"


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (QWEN3, {}, [after(THOUGHT, "user")]),
        (QWEN3, {"tools": True}, [after(THOUGHT, "user")]),
        (QWEN3, {"enable_thinking": False}, [after(it, role) for it in ("", THOUGHT) for role in ("user", "tool")]),
        (QWEN3_OPENS, {}, [after(THOUGHT, "user")]),
        (QWEN25, {}, []),
        (QWEN25, {"tools": True}, []),
        (MISTRAL, {}, []),
        (MISTRAL, {"tools": True}, [after("", "user"), after(THOUGHT, "user")]),
        (DEEPSEEK_R1, {}, [after(THOUGHT, "user"), after(THOUGHT, "tool")]),
        (ZEPHYR, {}, []),
        (QWEN3, {"continue_final_message": True}, [after(THOUGHT, "user")]),
    ],
)
def test_what_a_template_rewrites_is_known_before_the_run(
    template: str, options: dict[str, Any], expected: list[str]
) -> None:
    assert rewrites(chat(template, **options)) == expected


def test_what_follows_a_reply_is_what_the_template_writes_behind_it_and_nothing_of_what_is_there() -> None:
    reply = said("assistant", "4")
    for template in (QWEN25, QWEN3, QWEN3_OPENS, MISTRAL, DEEPSEEK_R1):
        at = chat(template, tools=template != DEEPSEEK_R1)
        whole = [*at.begin, reply, said("user", "Sure?")]
        assert at.plain and at.prompt(whole) == at.tokenizer.apply_chat_template(whole, tokenize=False, **at.args)
    for template in (QWEN25, QWEN3):
        at = chat(template, tools=True)
        text = at.behind([*at.begin, reply], [said("user", "Sure?")])
        assert text == "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    text = at.behind([*at.begin, reply], [said("tool", "42"), said("tool", "43")])
    assert text is not None and text.count("<|im_start|>user") == 1 and "42" in text and "43" in text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Su"}, {"type": "text", "text": "re?"}]}]
    assert at.behind([*at.begin, reply], parts) == at.behind([*at.begin, reply], [said("user", "Sure?")])


def test_thoughts_that_the_prompt_opens_are_no_rewriting() -> None:
    at = chat(QWEN3_OPENS)
    before = [*at.begin, said("assistant", "why\n</think>\n\n4")]
    end = "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert at.behind(before, [said("tool", "42")]) == f"<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n{end}"
    assert at.behind(before, [said("user", "42")]) is None


def test_thoughts_and_calls_of_the_rows_own_messages_are_rewritten_like_those_of_replies() -> None:
    thought = {**CALL, "reasoning_content": "why"}
    for call in (CALL, thought):
        at = chat(QWEN3, tools=True, begin=[said("user", "2+2?"), call, said("tool", "4")])
        before = [*at.begin, said("assistant", "4")]
        assert at.behind(before, [said("tool", "5")]) is not None
        assert (at.behind(before, [said("user", "Sure?")]) is None) == (call is thought)


def test_a_message_that_the_template_leaves_out_is_told() -> None:
    at = chat(ZEPHYR)
    before = [*at.begin, said("assistant", "4")]
    assert at.behind(before, [said("user", "5")]) == "</s>\n<|user|>\n5</s>\n<|assistant|>\n"
    with pytest.raises(RowError, match=r"row 9: what is said must .* leaves out message 3, of role 'tool'"):
        at.behind(before, [said("tool", "5"), said("user", "Sure?")])
