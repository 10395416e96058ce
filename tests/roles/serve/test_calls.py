"""Calls of tools as model families write them, read as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rondo.roles.serve.calls import Call, call_reader

CODER = "<tool_call>\\n<function={{ name }}>\\n<parameter={{ key }}>"
"""Of the template that decides."""


def tool(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def coder(*parameters: tuple[str, str]) -> str:
    """A call as Qwen3-Coder writes it."""
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"\n<function=f>\n{inner}</function>\n"


def read(text: str, *tools: Any) -> Any:
    call = call_reader(CODER, tools)(text)
    return call and json.loads(call.arguments)


def test_the_chat_template_says_which_way_calls_are_written() -> None:
    hermes, written = '{"name": "f", "arguments": {"a": 1}}', coder(("a", "1"))
    for template, own, other in (
        ("{}<tool_call>", hermes, written),
        (CODER, written, hermes),
        ({"x": CODER}, written, hermes),
    ):
        reader = call_reader(template, [tool(a={"type": "integer"})])
        assert reader(own) == Call("f", '{"a":1}') and reader(other) is None


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "two\n\n  lines ", "two\n\n  lines "),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "a </parameter> in it", "a </parameter> in it"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "36893488147419103233", 36893488147419103233),
        ({"type": "array"}, "(36893488147419103233, 'a')", [36893488147419103233, "a"]),
        ({"type": "number"}, "-0.5", -0.5),
        ({"type": "number"}, "many", "many"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "array"}, '[1, "b"]', [1, "b"]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": {}}', {"a": {}}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
    ],
)
def test_a_value_without_quotes_is_what_the_schema_of_its_tool_says(schema: Any, text: str, value: Any) -> None:
    assert read(coder(("a", text)), tool(a=schema)) == {"a": value}


def test_an_integer_of_any_size_is_called_with_as_it_was_written() -> None:
    written = '{"name": "f", "arguments": {"a": 36893488147419103233}}'
    assert call_reader("{}<tool_call>", [])(written) == Call("f", '{"a":36893488147419103233}')


def test_values_of_tools_and_parameters_that_nobody_described_are_text() -> None:
    assert read(coder(("a", "1"), ("b", "x")), tool(b={"type": "string"})) == {"a": "1", "b": "x"}
    assert read(coder(("a", "1"))) == {"a": "1"} and read(coder()) == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "f(1)", "<function=f>", "<function=>\n</function>", "<function=f>\nwords\n</function>",
        "<function=f><parameter=a>1</function>", "<function=f></function> and more",
        "<function=f><parameter=a>1</parameter> words</function>",
    ],
)  # fmt: skip
def test_what_is_no_whole_call_is_none(text: str) -> None:
    assert read(text, tool(a={"type": "string"})) is None


def test_a_call_that_can_be_read_and_not_be_written_again_is_none() -> None:
    deep = "[" * 300 + "]" * 300
    assert call_reader("", [])(f'{{"name": "f", "arguments": {{"a": {deep}}}}}') is None
    assert read(coder(("a", deep)), tool(a={"type": "array"})) is None
