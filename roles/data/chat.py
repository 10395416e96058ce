"""Chat: what a chat template writes between a reply of the policy and its next one, and whether it leaves what came before.

Owns that text for one row's conversation. Does not own its tokens' place in a sample (`roles/sampling/episode.py`) or the first
prompt (`prompts.py`). Imports no torch, and transformers only for a tokenizer that is handed in.

    chat = Chat.of(tokenizer, row, config.data)
    chat.behind([*chat.begin, reply("4")], [user("Sure?")])
      -> "<|im_end|>\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n"

A template *extends* where the conversation with a reply and what follows begins with the text that the reply was sampled behind,
and the reply. Then the tokens of the rest alone are new. Many always do; others rewrite earlier turns, as Qwen3's, which leaves
out their thinking once a user speaks again, and Mistral's, which writes the tools in front of the last user's words. That is
looked at with a letter in the place of all that was said, since what templates look at is who speaks, what is called, and whether
a reply has thoughts. So spaces that a template takes off a reply, or sets in front of it, are no rewriting.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from rondo.models.chat_template import left_out
from rondo.models.control_tokens import backend_of, spelt
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import has_media, messages_of, of_text, template_args

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

Message = Mapping[str, Any]
_PLAIN, _CLOSED = "R", "T\n</think>\n\nR"
_THOUGHT = f"<think>\n{_CLOSED}"
_SAID = frozenset(("role", "content", "name", "tool_call_id"))
_GIVEN = frozenset(("add_generation_prompt", "enable_thinking", "tools"))
_TEXT = {"type": "text", "text": "U"}


@dataclass(frozen=True, slots=True)
class Chat:
    """The conversation that a row begins. `args` are the template's, beside the messages; `plain` says that it may be given them
    and texts as they are. Else transformers copies them all into what no template can do harm with, for most of its time."""

    tokenizer: Any
    name: str
    begin: Sequence[Message]
    args: Mapping[str, Any]
    plain: bool = False

    @classmethod
    def of(cls, tokenizer: Any, row: Row, config: DataConfig) -> Chat | None:
        """None where the prompt is plain text."""
        if isinstance(row.prompt, str) and not config.apply_chat_template:
            return None
        own = template_args(row, config)
        own.pop("continue_final_message", None)
        plain = own.keys() <= _GIVEN and _is_plain([own, tokenizer.chat_template]) and backend_of(tokenizer) is not None
        return cls(tokenizer, row.name, messages_of(row, config), own | {"add_generation_prompt": True}, plain)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the policy goes on. Control tokens that somebody spells since the row are marked
        (`models/control_tokens.py`). RowError for messages that the template does not take, or leaves out."""
        shown = [of_text(message) for message in messages]
        self._refuse_left_out(shown)
        return self._written([each if each in self.begin else self._spelt(each) for each in shown])

    def _spelt(self, message: Message) -> Message:
        return message if message["role"] == "assistant" else spelt(self.tokenizer, of_text(message))

    def _written(self, messages: Sequence[Message]) -> str:
        shown = [*map(of_text, messages)]
        try:
            if self.plain and all(each.keys() <= _SAID and {*map(type, each.values())} == {str} for each in shown):
                template, given = _compiled(self.tokenizer.chat_template)
                given = given | self.tokenizer.special_tokens_map | self.args | {"messages": shown}
                written = "".join(template.root_render_func(template.new_context(given, shared=True)))
            else:
                written = self.tokenizer.apply_chat_template(shown, tokenize=False, **self.args)
        except Exception as error:  # whatever the template makes of somebody's messages is about these
            raise RowError(
                f"{self.name}: what is said must suit the chat template, got {type(error).__name__}: {error}. Correct it"
            ) from error
        return str(written)

    def behind(self, before: Sequence[Message], said: Sequence[Message]) -> str | None:
        """The text that follows the last reply, which ends `before`, where these messages come next; None where the template does
        not extend. RowError where it leaves out what they say."""
        stand_ins = [_stand_in(message) for message in before]
        start, reply = self._start(stand_ins, said), stand_ins[-1]["content"]
        whole = self._written([*stand_ins, *map(self._spelt, said)])
        behind = whole[len(start) :].lstrip() if whole.startswith(start) else ""
        return behind[len(reply) :] if behind.startswith(reply) else None

    def _start(self, stand_ins: Sequence[Message], said: Sequence[Message]) -> str:
        """What the last reply was sampled behind. RowError where the template leaves out what is said. Both are looked at once
        for all conversations of one form, of which a run has few."""
        said = [each if isinstance(each.get("content"), list) else {**each, "content": "U"} for each in said]
        try:
            form = orjson.dumps([self.tokenizer.chat_template, self.args, stand_ins, said, self.plain])
            return _start_of(self.tokenizer, form)
        except (TypeError, RowError):  # media, which have no form; an error names the row
            return self._looked(stand_ins, said)

    def _looked(self, stand_ins: Sequence[Message], said: Sequence[Message]) -> str:
        self._refuse_left_out([*stand_ins, *said])
        return self._written(stand_ins[:-1])

    def _refuse_left_out(self, messages: Sequence[Message]) -> None:
        if (words := left_out(self.tokenizer, messages, **self.args)) is not None:
            raise RowError(
                f"{self.name}: what is said must suit the chat template, which leaves out {words}. Say it in another role"
            )


@functools.lru_cache(16)
def _compiled(chat_template: str) -> tuple[Any, dict[str, Any]]:
    """A template, and what every one is given: to ask each time for that takes a fifth of a rendering."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(chat_template)
    return template, {**template.globals, "documents": None, "tools": None}


@functools.lru_cache(1024)
def _start_of(tokenizer: Any, form: bytes) -> str:
    _, args, stand_ins, said, plain = orjson.loads(form)
    return Chat(tokenizer, "", (), args, plain)._looked(stand_ins, said)


def _is_plain(value: Any) -> bool:
    """Whether it is of JSON's types alone, and of no types derived from them."""
    if type(value) is dict:
        return all(type(name) is str and _is_plain(each) for name, each in value.items())
    return all(map(_is_plain, value)) if type(value) is list else type(value) in (str, int, float, bool, type(None))


def rewrites(chat: Chat) -> list[str]:
    """What a template does not extend behind, in words; empty where it always does. What it cannot render is left out."""

    def is_rewritten(before: Sequence[Message], role: str) -> bool:
        try:
            return chat.behind(before, [_message(role, "U")]) is None
        except RowError:
            return False

    found = []
    try:
        opens = chat.prompt([_message("user", "U")]).rstrip().endswith("<think>")
    except RowError:
        opens = False
    for thought in (_CLOSED,) if opens else (_PLAIN, _THOUGHT):
        for role in ("user", "tool"):
            before = [_message("user", "U"), _message("assistant", thought)]
            # A second time, since what is said last decides what becomes of all replies.
            twice = [*before, _message("tool", "U"), _message("assistant", _CLOSED if opens else _PLAIN)]
            if is_rewritten(before, role) or is_rewritten(twice, role):
                thinking = " with thoughts" if thought != _PLAIN else ""
                found.append(f"a reply{thinking} that a message of role {role!r} follows")
    return found


def check_text(name: str, messages: Sequence[Message]) -> None:
    """RowError for media, which a row of text cannot begin with."""
    for message in filter(has_media, messages):
        raise RowError(
            f"{name}: what a further row begins with must be text, got media in a message of role {message['role']!r}. Put "
            "them into the prompt, or say them behind it"
        )


def _stand_in(message: Message) -> dict[str, Any]:
    text = message.get("content")
    if text is None:  # calls alone
        return dict(message)
    content = "U" if message["role"] != "assistant" else _PLAIN
    if isinstance(text, list):  # media that a template may count
        return {**message, "content": [*(part for part in text if part.get("type") != "text"), _TEXT]}
    if content == _PLAIN and "</think>" in text:
        content = _THOUGHT if "<think>" in text else _CLOSED  # the prompt may have opened them
    return {**message, "content": content}


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
