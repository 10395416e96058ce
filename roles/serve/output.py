"""Output: a model's text as reasoning, content and tool calls, as it comes.

Owns the marks: <think> .. </think>, and <tool_call> .. </tool_call>. Owns neither what stands in a call (`calls.py`) nor a token:
the text is read, the tokens that it came from stay as they are.

    reader = OutputReader(calls=call_reader(template, tools), reasoning=False)
    reader.feed("<think>hm</think>\\n\\nHi <tool_call>{..}")    # [Part("reasoning", "hm"), Part("content", "Hi")]
    reader.finish()                                            # what is left: here the unfinished call, as content

Invariant: the same parts come from a text fed at once and fed in pieces, but for where pieces are cut. What looks like a tool
call and is none, because it cannot be read or its end is missing, stays content, to the character; so a call is told whole, when
its end is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rondo.roles.serve.calls import CallReader

_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the output. Of a "call", `text` is the arguments as JSON and `name` the function."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    name: str = ""


class OutputReader:
    """`reasoning`: the text begins inside of it, since the prompt ended with <think>. Without `calls` those stay content."""

    def __init__(self, *, calls: CallReader | None, reasoning: bool) -> None:
        self._calls = calls
        self._kind: Literal["reasoning", "content"] = "reasoning" if reasoning else "content"
        self._open = ""  # the mark of a call whose end has not come
        self._left = ""
        self._space = ""  # white space that has come, and is told only if words follow
        self._bare = True  # a mark stands before the next words
        self._found: list[Part] = []
        self._reading = self._read()

    def feed(self, text: str) -> list[Part]:
        """What the text so far says for sure; the rest is kept."""
        self._left += text
        next(self._reading)
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Part]:
        """What is left at the end."""
        text = self._space + self._open + self._left
        self._left = self._space = ""
        return [Part(self._kind, text)] if text else []

    def _read(self) -> Iterator[None]:
        """Takes what is left, and stops wherever more is needed."""
        if self._kind == "content":
            while _THINK.startswith(bare := self._left.lstrip()) and bare != _THINK:
                yield
            self._bare = bare.startswith(_THINK)
            if self._bare:
                self._kind, self._left = "reasoning", bare[len(_THINK) :]
        if self._kind == "reasoning":
            yield from self._until(_THOUGHT)
            self._kind, self._space, self._bare = "content", "", True
        while self._calls is None:
            text, self._left = self._left, ""
            self._say(text)
            yield
        while True:
            yield from self._until(_CALL)
            self._open = _CALL
            while _CALLED not in self._left:
                yield
            text, _, self._left = self._left.partition(_CALLED)
            self._open = ""
            if (call := self._calls(text)) is None:
                self._say(_CALL + text + _CALLED)
            else:
                self._space, self._bare = "", True
                self._found.append(Part("call", call.arguments, call.name))

    def _until(self, mark: str) -> Iterator[None]:
        """Tells what stands before the mark, and takes the mark."""
        while mark not in self._left:
            cut = len(self._left) - _tail(self._left, mark)
            text, self._left = self._left[:cut], self._left[cut:]
            self._say(text)
            yield
        text, _, self._left = self._left.partition(mark)
        self._say(text)

    def _say(self, text: str) -> None:
        """Words, without the white space that only sets them apart from the marks around them; neighbours of one kind as one."""
        text = self._space + text
        if self._bare:
            text = text.lstrip()
        words = text.rstrip() if self._calls is not None or self._kind == "reasoning" else text
        self._space = text[len(words) :]
        if not words:
            return
        self._bare = False
        if self._found and self._found[-1].kind == self._kind:
            words = self._found.pop().text + words
        self._found.append(Part(self._kind, words))


def _tail(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
