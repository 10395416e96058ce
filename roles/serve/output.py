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
        self._state: Literal["start", "reasoning", "content", "call"] = "reasoning" if reasoning else "start"
        self._left = ""
        self._space = ""  # white space that has come, and is told only if words follow
        self._bare = True  # a mark stands before the next words

    def feed(self, text: str) -> list[Part]:
        """What the text so far says for sure; the rest is kept."""
        self._left += text
        found: list[Part] = []
        while self._step(found):
            pass
        return _joined(found)

    def finish(self) -> list[Part]:
        """What is left at the end."""
        kind: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        text = self._space + (_CALL if self._state == "call" else "") + self._left
        self._left = self._space = ""
        return [Part(kind, text)] if text else []

    def _step(self, found: list[Part]) -> bool:
        """One move; False when more text is needed."""
        match self._state:
            case "start":
                return self._begin()
            case "reasoning":
                return self._reason(found)
            case "content":
                return self._content(found)
            case "call":
                return self._call(found)

    def _begin(self) -> bool:
        bare = self._left.lstrip()
        if bare.startswith(_THINK):
            self._left, self._state = bare[len(_THINK) :], "reasoning"
            return True
        if not bare or _THINK.startswith(bare):
            return False
        self._state = "content"
        self._bare = False
        return True

    def _reason(self, found: list[Part]) -> bool:
        if not self._until(_THOUGHT, "reasoning", found):
            return False
        self._state, self._space, self._bare = "content", "", True
        return True

    def _content(self, found: list[Part]) -> bool:
        if self._calls is None:
            text, self._left = self._left, ""
            self._say(text, "content", found)
            return False
        if not self._until(_CALL, "content", found):
            return False
        self._state = "call"
        return True

    def _until(self, mark: str, kind: Literal["reasoning", "content"], found: list[Part]) -> bool:
        """Tells what stands before the mark, and takes the mark; False where it has not come."""
        at = self._left.find(mark)
        cut = at if at >= 0 else len(self._left) - _tail(self._left, mark)
        text, self._left = self._left[:cut], self._left[cut:]
        self._say(text, kind, found)
        if at >= 0:
            self._left = self._left[len(mark) :]
        return at >= 0

    def _say(self, text: str, kind: Literal["reasoning", "content"], found: list[Part]) -> None:
        """Words, without the white space that only sets them apart from the marks around them."""
        text = self._space + text
        if self._bare:
            text = text.lstrip()
        words = text.rstrip() if self._calls is not None or kind == "reasoning" else text
        self._space = text[len(words) :]
        if words:
            self._bare = False
            found.append(Part(kind, words))

    def _call(self, found: list[Part]) -> bool:
        at = self._left.find(_CALLED)
        if at < 0:
            return False
        text, self._left, self._state = self._left[:at], self._left[at + len(_CALLED) :], "content"
        call = self._calls(text) if self._calls is not None else None
        if call is None:
            self._say(_CALL + text + _CALLED, "content", found)
        else:
            self._space, self._bare = "", True
            found.append(Part("call", call.arguments, call.name))
        return True


def _tail(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind != "call" and found[-1].kind == part.kind:
            found[-1] = Part(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found
