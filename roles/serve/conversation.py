"""Conversation: the messages, tools and template arguments of a chat, as a chat template may be given them.

Owns which fields a message has, and which arguments a caller may give the operator's template. Does not own the template
(`prompt_work.py`).

    messages_of([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], template)  # [{"role": "user", "content": "hi"}]

Invariant: what replaces the template, or decides what becomes of its text, is the operator's alone.
"""

from __future__ import annotations

import functools
import inspect
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

from rondo.roles.serve.fields import refuse_unknown, shown
from rondo.roles.serve.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from rondo.runtime.errors import ConfigError
from rondo.runtime.values import read_json, write_json

Message = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", *_REASONING)
_IGNORED = ("refusal", "annotations", "audio", "function_call")
"""What OpenAI's answers have, and come back in a next request."""
_GIVEN = {"add_generation_prompt", "continue_final_message", "documents"}
"""Of transformers' own arguments for a template, those that callers may give."""


def messages_of(given: Any, template: object) -> list[Message]:
    """The conversation as templates want it: content as text, arguments of calls as objects. Fields that are not OpenAI's may be
    there where the template names them."""
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_MESSAGES:
        raise ConfigError(f"messages must be a list of 1 to {MAX_MESSAGES} messages, got {shown(given)}. Correct it")
    named = _named(str(template))
    return [_message(message, f"messages[{number}]", named) for number, message in enumerate(given)]


def tools_of(tools: Any, choice: Any) -> list[Any] | None:
    """What the template is told of tools; None where the model is not to call any."""
    if tools is not None and not (
        isinstance(tools, list) and len(tools) <= MAX_TOOLS and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ConfigError(f"tools must be a list of at most {MAX_TOOLS} objects, got {shown(tools)}. Correct it")
    if choice not in ("auto", "none"):
        raise ConfigError(
            f"tool_choice must be 'auto' or 'none', since calls are not forced here, got {shown(choice)}. Change it"
        )
    return tools if tools and choice == "auto" else None


def arguments_of(found: Any, tokenizer: Any) -> dict[str, Any]:
    """`chat_template_kwargs`: what the template is given beside messages and tools."""
    if not isinstance(found, dict):
        raise ConfigError(f"chat_template_kwargs must be an object, got {type(found).__name__}. Correct it")
    own = {
        "messages",
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *tokenizer.special_tokens_map,
    } - _GIVEN
    for name in found:
        if name in own:
            raise ConfigError(
                f"chat_template_kwargs must leave what the server decides to it, got {shown(name)}. Remove it"
            )
    return found


def meaning_of(message: Mapping[str, Any]) -> bytes:
    """Return what a message means, however it is written down: the same for JSON of a call in another form, for white space
    around what an assistant says, and for reasoning under another name."""
    said = {name: value for name, value in message.items() if value is not None and name not in _IGNORED}
    try:
        if said["role"] == "assistant":
            functions = [_tool_call(call, "")["function"] for call in said.pop("tool_calls", ())]
            thoughts = [str(said.pop(name)).strip() for name in _REASONING if name in said]
            said["calls"] = [[each["name"], _plain(each["arguments"])] for each in functions]
            said |= {"content": (said.get("content") or "").strip(), "thoughts": "".join(thoughts)}
        return write_json(said, orjson.OPT_SORT_KEYS)
    except (TypeError, RecursionError):  # what has no JSON is like nothing else
        return secrets.token_bytes(16)


def meanings_of(reply: Mapping[str, Any]) -> set[bytes]:
    """Return what a reply means to those who give it back, with its reasoning or without."""
    return {meaning_of(reply), meaning_of({name: value for name, value in reply.items() if name not in _REASONING})}


def _plain(value: Any) -> Any:
    """JSON in which whole numbers are integers: other languages have no others."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _message(message: Any, where: str, named: frozenset[str]) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ConfigError(
            f"{where} must be an object with a role of {', '.join(_ROLES)}, got {shown(message)}. Correct it"
        )
    made = {name: value for name, value in message.items() if value is not None and name not in _IGNORED}
    refuse_unknown([name for name in made if name not in named], _KNOWN, _IGNORED, where)
    made["role"] = "system" if made["role"] == "developer" else made["role"]
    made["content"] = _content(made.get("content", ""), where)
    if "tool_calls" in made:
        calls = made["tool_calls"]
        if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
            raise ConfigError(
                f"{where}.tool_calls must be a list of at most {MAX_TOOLS}, got {shown(calls)}. Correct it"
            )
        made["tool_calls"] = [_tool_call(call, where) for call in calls]
    return made


@functools.lru_cache(maxsize=8)
def _named(template: str) -> frozenset[str]:
    """What may be a field of a message that this template reads."""
    return frozenset(re.findall(r"[.'\"](\w+)", template))


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise ConfigError(f"{where}.content must be text or a list of at most {MAX_PARTS} parts, got {shown(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}.content must hold parts of text, which is all that is taken here, got {shown(part)}"
            )
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}.tool_calls must hold functions with a name, got {shown(call)}. Correct it")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        with suppress(ValueError):  # else it stays as the model wrote it, and the template shows that
            arguments = read_json(arguments)
    return call | {"function": function | {"arguments": arguments}}
