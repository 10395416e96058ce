"""Chats: from the ways in which data sets write them to the messages that a chat template takes.

Owns keys, roles, tools and the shape of messages. Does not own media in them (`media_rows.py`) or rendering (`prompts.py`).

Invariant: a field that is null is as one that is not there, since parquet and arrow add nulls to objects that differ in their
fields: the same rows are the same messages in every format. Texts of JSON (arguments of calls, tools) keep their nulls.

    {"from": "human", "value": "Hi"}     with message_keys={"from": "role", "value": "content"}, as ShareGPT has it
    {"role": "user", "content": "Hi"}    OpenAI; content is text or a list of parts, and may be left out beside tool_calls
    tools                                a list of function schemas, or its JSON

    read_messages("a.jsonl:1", [{"from": "human", "value": "Hi"}], config)   ->   [{"role": "user", "content": "Hi"}]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rondo.roles.data.sources import RowError
from rondo.runtime.values import read_json

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

_SPELLINGS = {"from": "role", "speaker": "role", "value": "content", "text": "content"}


def read_messages(name: str, messages: Any, config: DataConfig) -> list[dict[str, Any]]:
    """The messages of a row's prompt, each with role and content or tool calls. RowError, which names the row, otherwise."""
    if not isinstance(messages, list | tuple) or not messages:
        got = "an empty list" if isinstance(messages, list | tuple) else type(messages).__name__
        raise RowError(
            f"{name}: {config.prompt!r} must be text or a list of chat messages, got {got}. "
            "Correct the row, or name another column in data.prompt"
        )
    return [_message(name, message, config) for message in messages]


def read_tools(name: str, value: Any, config: DataConfig) -> list[Any]:
    """The tools of a row, none for null. RowError for what is neither a list of objects nor its JSON."""
    tools = _parsed(value) if isinstance(value, str) else value
    if tools is None:
        return []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(
            f"{name}: {config.tools!r} must be a list of tools, its JSON, or null, got {type(value).__name__}. "
            "Correct the row, or name another column in data.tools"
        )
    return list(tools) if isinstance(value, str) else [_without_nulls(tool) for tool in tools]


def _message(name: str, message: Any, config: DataConfig) -> dict[str, Any]:
    keys = config.message_keys
    found: dict[str, Any] = {}
    if isinstance(message, Mapping):
        found = {keys.get(str(key), str(key)): value for key, value in _without_nulls(message).items()}
    calls = found.get("tool_calls")
    if isinstance(calls, str):
        found["tool_calls"] = calls = _parsed(calls)
    if not isinstance(found.get("role"), str) or not ("content" in found or calls):
        got = f"the keys {', '.join(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
        spelt = {key: _SPELLINGS[key] for key in message if key in _SPELLINGS} if isinstance(message, Mapping) else {}
        way = f"Set data.message_keys to {spelt}" if len(spelt) > 1 else "Correct the row, or set data.message_keys"
        raise RowError(f"{name}: a message of {config.prompt!r} must have role and content, got {got}. {way}")
    found["role"] = config.message_roles.get(found["role"], found["role"])
    found.setdefault("content", "")  # some templates write None, or fail, where a message with calls has none
    if calls:
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise RowError(
                f"{name}: tool_calls of a message must be a list of objects, or its JSON, got {calls!r:.80}. Correct it"
            )
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _without_nulls(value: Any) -> Any:
    """The same without those fields of objects, at any depth, that are null."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _call(call: Any) -> Any:
    """Arguments are objects for templates, which write them as JSON; OpenAI's are JSON already."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _parsed(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _parsed(text: str) -> Any:
    """What the JSON stands for; the text itself where it is none."""
    try:
        return read_json(text)
    except ValueError:
        return text
