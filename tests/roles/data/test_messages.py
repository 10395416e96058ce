"""Chats in the shapes that data sets have them in are the same messages; what is wrong is named with the setting to change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rondo.roles.config import DataConfig
from rondo.roles.data.messages import read_messages, read_tools
from rondo.roles.data.sources import RowError

SHAREGPT = {"message_keys": {"from": "role", "value": "content"}, "prompt": "conversations"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def config(**options: Any) -> DataConfig:
    return DataConfig(path="unused", apply_chat_template=True, **options)


def refused(messages: Any, **options: Any) -> str:
    with pytest.raises(RowError) as raised:
        read_messages("a.jsonl:1", messages, config(**options))
    return str(raised.value)


def test_sharegpt_needs_its_keys_and_has_its_roles() -> None:
    rows = [{"from": "system", "value": "Be short."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    assert read_messages("a.jsonl:1", rows, config(**SHAREGPT)) == [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    ]  # fmt: skip
    assert refused(rows, prompt="conversations") == (
        "a.jsonl:1: a message of 'conversations' must have role and content, got the keys from, value. "
        "Set data.message_keys to {'from': 'role', 'value': 'content'}"
    )


def test_other_roles_are_those_that_the_settings_name() -> None:
    rows = [{"role": "customer", "content": "Hi"}, {"role": "tool", "content": "3"}]
    found = read_messages("a.jsonl:1", rows, config(message_roles={"customer": "user"}))
    assert [message["role"] for message in found] == ["user", "tool"]


def test_calls_of_tools_need_no_content_and_bring_their_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [{"role": "user", "content": "1?"}, {"role": "assistant", "tool_calls": [call]}]
    rows.append({"role": "tool", "tool_call_id": "1", "content": "1"})
    found = read_messages("a.jsonl:1", rows, config())
    assert found[1]["tool_calls"] == [{**call, "function": {"name": "add", "arguments": {"a": 1}}}]
    assert (found[0], found[2]) == (rows[0], rows[2])
    call["function"] = {"name": "add", "arguments": '{"a": 36893488147419103233}'}
    assert read_messages("a.jsonl:1", rows, config())[1]["tool_calls"][0]["function"]["arguments"] == {
        "a": (1 << 65) + 1
    }
    found = read_messages("a.jsonl:1", [{"role": "assistant", "tool_calls": json.dumps([call])}], config())
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"a": (1 << 65) + 1}
    assert "tool_calls of a message must be a list of objects" in refused(
        [{"role": "assistant", "tool_calls": "add(1)"}]
    )
    broken = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]
    assert read_messages("a.jsonl:1", broken, config()) == [broken[0] | {"content": ""}]


def test_a_field_that_is_null_is_none_and_so_it_is_in_objects_but_not_in_texts_of_json() -> None:
    call = {"id": None, "function": {"name": "add", "arguments": {"a": 1, "b": None, "of": [{"c": None}, None]}}}
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": "1?", "from": None, "tool_calls": None, "weight": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    added = {"function": {"name": "add", "arguments": {"a": 1, "of": [{}, None]}}}
    assert read_messages("a.jsonl:1", rows, config(message_keys={"from": "role"})) == [
        {"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [added]}
    ]  # fmt: skip
    call["function"]["arguments"] = '{"b": null}'  # type: ignore[index]
    found = read_messages("a.jsonl:1", rows, config())[1]["tool_calls"][0]
    assert found == {"function": {"name": "add", "arguments": {"b": None}}}
    schema = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"default": None}, "b": None}}}
    kept = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
    assert read_tools("a.jsonl:1", [schema], config(tools="tools")) == [kept]
    assert read_tools("a.jsonl:1", json.dumps([schema]), config(tools="tools")) == [schema]
    assert "must have role and content, got the keys role, content" in refused([{"role": "tool", "content": None}])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "'prompt' must be text or a list of chat messages, got an empty list"),
        (7, "'prompt' must be text or a list of chat messages, got int"),
        (
            ["Hi"],
            "a message of 'prompt' must have role and content, got str. Correct the row, or set data.message_keys",
        ),
        (
            [{"role": "user"}],
            "a message of 'prompt' must have role and content, got the keys role. Correct the row, or",
        ),
        (
            [{"role": None, "content": "Hi"}],
            "a message of 'prompt' must have role and content, got the keys role, content",
        ),
    ],
)
def test_what_is_no_chat_is_an_error_of_the_row(messages: Any, text: str) -> None:
    assert refused(messages).startswith(f"a.jsonl:1: {text}")


@pytest.mark.parametrize("value", [[ADD], json.dumps([ADD])])
def test_tools_are_a_list_or_its_json(value: Any) -> None:
    assert read_tools("a.jsonl:1", value, config(tools="tools")) == [ADD]


@pytest.mark.parametrize("value", ["add", {"name": "add"}, ["add"], 7])
def test_tools_in_another_form_are_an_error_of_the_row(value: Any) -> None:
    with pytest.raises(RowError, match=r"a.jsonl:1: 'tools' must be a list of tools, its JSON, or null, got "):
        read_tools("a.jsonl:1", value, config(tools="tools"))
    assert read_tools("a.jsonl:1", None, config(tools="tools")) == []
