"""Chat templates: the tokens with which they end what the assistant says, and what they leave out of a chat.

Owns both answers, which are found by rendering short stand-ins. Does not own how rows are rendered (`roles/data/prompts.py`) or
control tokens in texts (`control_tokens.py`). Imports no torch, and takes tokenizers of transformers that are handed in.

    turn_ends(tokenizer)                                               # ("<|im_end|>",)
    left_out(tokenizer, [user, {"role": "critic", ...}], tools=[...])  # "message 2, of role 'critic'"; None where all is shown
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rondo.models.control_tokens import control_tokens

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message for thoughts; transformers copies one to the others."""
_ID = "call40917"
"""Some templates want call ids of nine characters."""
_MARKER = "m40917"
_TRAILING_CHARS = 512
"""Of a text, where its end is looked for: the search takes the square of long white space."""
_QUESTION = {"role": "user", "content": "Q"}


def turn_ends(tokenizer: Any) -> tuple[str, ...]:
    """Return the control tokens with which the tokenizer's chat template ends an answer, or calls of tools; none without a
    template, and for one that writes no such token."""
    template = getattr(tokenizer, "chat_template", None)
    return _turn_ends(tokenizer, str(template)) if template else ()


def end_of_turn(tokenizer: Any, text: str) -> tuple[int, int] | None:
    """Return where the control token that ends a turn begins and ends, in a text that the template wrote up to that turn; None
    where the text ends with no such token. White space and further control tokens may follow it."""
    trailing = _trailing(tokenizer, text)
    found = (text.find(end, trailing) for end in turn_ends(tokenizer))
    spans = [(start, start + len(end)) for start, end in zip(found, turn_ends(tokenizer), strict=True) if start >= 0]
    return min(spans, default=None)


def left_out(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    whole: int | None = None,
    added: int = 0,
    **args: Any,
) -> str | None:
    """Return words for the first tool, message or part of a message that the template does not write; None where it writes all.
    Messages are counted from 1 behind those that were `added` in front.

    Of a message something must be written, and all of its calls; of message `whole`, which is learnt, its content and reasoning
    too. The template is given stand-ins with markers in the place of texts, of the same form: who speaks, what is called, whether
    there are thoughts. A template that fails on them leaves nothing out."""
    markers = [dict[str, str]() for _ in messages]
    stand_ins = [_stand_in(message, number, markers[number]) for number, message in enumerate(messages)]
    named = {f"{_MARKER}tool{number}z": tool for number, tool in enumerate(tools or ())}
    text = _rendered(tokenizer, stand_ins, [_renamed(tool, name) for name, tool in named.items()] or None, args)
    for tool in (tool for name, tool in named.items() if text and name not in text):
        return f"the tool {_function(tool).get('name')!r}"
    for number, found in enumerate(markers if text else ()):
        gone = {kind for marker, kind in found.items() if marker not in text}
        place = "the message in front" if number < added else f"message {number + 1 - added}"
        name = f"{place}, of role {messages[number]['role']!r}"
        if "calls" in gone:
            return f"the calls of {name}"
        if gone and number == whole:
            return f"the {min(gone)} of {name}"
        if "content" in gone and "calls" not in found.values():
            return name
    return None


@functools.lru_cache(16)
def _turn_ends(tokenizer: Any, template: str) -> tuple[str, ...]:
    answer = {"role": "assistant", "content": _MARKER}
    behind = _rendered(tokenizer, [_QUESTION, answer], None, {}).rpartition(_MARKER)[2]
    first = control_tokens(tokenizer, template).search(behind)
    ends = [first[0]] if first is not None and not behind[: first.start()].strip() else []
    if ends:
        call = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        called = _rendered(tokenizer, [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], None, {})
        last = control_tokens(tokenizer, template).findall(called[_trailing(tokenizer, called) :])
        known = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = [token for token in last if token in known]
        if special and ends[0] not in last:
            ends.append(special[0])
    return tuple(ends)


def _trailing(tokenizer: Any, text: str) -> int:
    """Where the white space and control tokens begin that end a text."""
    pattern = control_tokens(tokenizer, str(tokenizer.chat_template)).pattern
    start = max(0, len(text) - _TRAILING_CHARS)
    found = re.search(rf"(?:{pattern}|\s)*\Z", text[start:])
    assert found is not None
    return start + found.start()


def _rendered(tokenizer: Any, messages: Any, tools: Any, args: Mapping[str, Any]) -> str:
    """Return the text, an empty one where the template fails."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **args))
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError):
        return ""


def _stand_in(message: Mapping[str, Any], number: int, markers: dict[str, str]) -> dict[str, Any]:
    """Return a message of the same form whose texts are markers, each of which is put into `markers` with what it stands for."""

    def marker(kind: str) -> str:
        text = f"{_MARKER}x{number}x{len(markers)}z"
        markers[text] = kind
        return text

    def called(call: Mapping[str, Any]) -> Any:
        own = {"id": _ID} if "id" in call else {}
        return _renamed({**call, **own}, marker("calls"), marker("calls") if _function(call).get("arguments") else "")

    found, content = dict(message), message.get("content")
    if isinstance(content, list):
        media = [{"type": part["type"]} for part in content if part.get("type") != "text"]
        texts = [{"type": "text", "text": marker("content")}] if any(part.get("text") for part in content) else []
        found["content"] = [*media, *texts]
    elif isinstance(content, str) and content.strip():
        thought, closed, said = content.rpartition("</think>")
        begin = ("<think>" if "<think>" in thought else "") + f"\n{_MARKER}\n</think>\n\n" if closed else ""
        found["content"] = begin + (marker("content") if said.strip() else "")
    thoughts = [name for name in REASONING if isinstance(message.get(name), str) and message[name].strip()]
    found |= dict.fromkeys(thoughts, marker("reasoning")) if thoughts else {}
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [called(call) if isinstance(call, Mapping) else call for call in calls]
    return found | ({"tool_call_id": _ID} if "tool_call_id" in message else {})


def _renamed(value: Mapping[str, Any], name: str, argument: str = "") -> dict[str, Any]:
    """Return a tool or a call with another name, and a call with other arguments."""
    function = {**_function(value), "name": name}
    if argument and isinstance(arguments := function.get("arguments"), str | Mapping):
        shown = {"a": argument}
        function["arguments"] = shown if isinstance(arguments, Mapping) else orjson.dumps(shown).decode()
    return {**value, "function": function} if "function" in value else function


def _function(value: Mapping[str, Any]) -> Mapping[str, Any]:
    found = value.get("function")
    return found if isinstance(found, Mapping) else value
