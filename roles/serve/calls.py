"""Calls: what a model writes between <tool_call> and </tool_call>, in the ways that model families do.

Owns the ways, and which of them a chat template asks for. Does not own the marks, nor where a call stands in an answer
(`output.py`). A way is one function; what it cannot read is no call, and stays text.

    hermes        {"name": "add", "arguments": {"a": 1}}                     Qwen2.5, Qwen3, Qwen3-VL, Qwen3-Omni
    qwen3_coder   <function=add><parameter=a>1</parameter></function>        Qwen3-Coder, Qwen3.5

    read = call_reader(tokenizer.chat_template, tools)
    read('{"name": "add", "arguments": {"a": 1}}')        # Call("add", '{"a":1}')
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rondo.runtime.values import read_json, write_json


class Call(NamedTuple):
    """`arguments` is a JSON object as text."""

    name: str
    arguments: str


Tools = Sequence[Mapping[str, Any]]
"""As in a request: {"type": "function", "function": {"name", "parameters": a JSON schema}}."""
CallReader = Callable[[str], Call | None]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def call_reader(chat_template: object, tools: Tools) -> CallReader:
    """The way that the template shows to the model. `chat_template`: its text, or several of them."""
    way = _WAYS["qwen3_coder" if "<function=" in str(chat_template) else "hermes"]

    def read(text: str) -> Call | None:
        try:
            return way(text, tools)
        except TypeError:  # nested so deeply that it can be read and not be written
            return None

    return read


def _hermes(text: str, tools: Tools) -> Call | None:
    try:
        read: Any = read_json(text.strip())
    except ValueError:
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str) or not read["name"]:
        return None
    arguments = read.get("arguments", {})
    if isinstance(arguments, str):
        return Call(read["name"], arguments)
    return Call(read["name"], write_json(arguments).decode()) if isinstance(arguments, dict) else None


def _qwen3_coder(text: str, tools: Tools) -> Call | None:
    """Values come as text, without quotes: what they are, the schema of the tool says."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name, inner = function[1].strip(), function[2]
    schemas, found, at = _properties(name, tools), {}, 0
    while at < len(inner) and (parameter := _PARAMETER.match(inner, at)) is not None:
        key = parameter[1].strip()
        found[key] = _value(parameter[2], schemas.get(key))
        at = parameter.end()
    return Call(name, write_json(found).decode()) if name and not inner[at:].strip() else None


_WAYS: Mapping[str, Callable[[str, Tools], Call | None]] = {"hermes": _hermes, "qwen3_coder": _qwen3_coder}


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """The schema of each parameter of a tool; nothing of a tool that nobody named."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _value(text: str, schema: object) -> Any:
    """Text where its schema says so or nothing, else what it is as JSON; text again where it is none."""
    kinds = _kinds(schema)
    if "null" in kinds and text.strip() in ("null", "None"):
        return None
    if not kinds or "string" in kinds:
        return text
    with suppress(ValueError):
        return read_json(text)
    # Templates show values in Python's words, and models write them back. Not all of them can be JSON.
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return read_json(write_json(ast.literal_eval(text.strip())))
    return text


def _kinds(schema: object) -> set[str]:
    """The types that a JSON schema allows at its top."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, Sequence):
        return set(map(str, kind))
    choices = schema.get("anyOf") or schema.get("oneOf") or ()
    return {found for choice in choices for found in _kinds(choice)} if isinstance(choices, Sequence) else set()
