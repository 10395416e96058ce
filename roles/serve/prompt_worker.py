"""What a prompt worker runs: a chat template over somebody's messages, or the tokenizer over somebody's text.

Owns what is computed, and the CPU time that one piece of work may take. Does not own the process around it
(`runtime/processes/pool_worker.py`), nor who waits for it (`prompt_work.py`). Light: transformers without torch.

    work = open_function("Qwen/Qwen3-8B")
    work(b'{"render": {"messages": [{"role": "user", "content": "hi"}]}, "most": 99, "cpu_s": 0.1}')    # a text
    work(b'{"encode": "hi", "special": true, "after": null, "marked": false, "cpu_s": 0.1}')            # int32 [T]

What a caller says is text, tools and arguments of the template included, but for what the assistant replied: control tokens that
it spells are marked where it is rendered, and encoded as the characters that they have (`models/control_tokens.py`).

Invariant: a template that loops for ever is interrupted after its CPU time and costs no process; what cannot be interrupted, the
pool ends at its deadline.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np

from rondo.models.chat_template import left_out
from rondo.models.control_tokens import encoded, spelt, without_marks
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import RowError
from rondo.roles.serve.pieces import REPLACEMENT
from rondo.roles.serve.text import text_of
from rondo.runtime.errors import ConfigError
from rondo.runtime.values import read_json

_REPLIES = frozenset(("content", "reasoning_content", "reasoning", "thinking"))
"""Of an assistant's message, what a policy sampled, control tokens included."""
_NONE: Mapping[str, Any] = MappingProxyType({})
_MAX_BYTES = 4 << 30
"""Of memory that a worker may have beyond what it starts with."""


class OverTime(Exception):
    """The CPU time of this piece of work is spent."""


def open_function(path: str) -> Callable[[bytes], Any]:
    """Does the work with the tokenizer at `path`; the work is told in JSON."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers reads tokenizers without it, in a quarter of the memory
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES if hard == resource.RLIM_INFINITY else hard, hard))
    signal.signal(signal.SIGPROF, _over_time)
    with suppress(Exception):  # what a first call compiles is no caller's time
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    return functools.partial(_timed, tokenizer)


def do(tokenizer: Any, asked: Mapping[str, Any]) -> Any:
    """The text of "render", of at most so many characters; of "behind", None where nothing goes on there; or the tokens of
    "encode" as int32 [T], which "marked" says was rendered, None for text that cannot go on behind the token "after"."""
    if "render" in asked:
        text = _render(tokenizer, **asked["render"])
        if len(text) > asked["most"]:
            raise ConfigError(f"a prompt must have at most {asked['most']} characters, got {len(text)}. Shorten it")
        return text
    if "behind" in asked:
        return _behind(tokenizer, asked["depth"], **asked["behind"])
    return _encode(tokenizer, asked["encode"], asked["special"], asked["after"], asked["marked"])


def _timed(tokenizer: Any, told: bytes) -> Any:
    asked = read_json(told)
    signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
    try:
        return do(tokenizer, asked)
    except OverTime:
        raise
    except MemoryError as error:
        raise ConfigError(
            "a prompt must fit into the memory of its worker, got one that does not. Shorten it"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _over_time(*_: Any) -> None:
    raise OverTime


def _render(tokenizer: Any, messages: list[Any], tools: Any = None, own: Any = _NONE, given: Any = _NONE) -> str:
    """The conversation as text, up to where the assistant begins. Arguments of the template are the operator's `own`, and those
    that the caller has `given`."""
    if not tokenizer.chat_template:
        raise ConfigError("the model must have a chat template for a chat, got none. Use /v1/completions")
    try:
        said = []
        for each in messages:
            replied = _REPLIES if each["role"] == "assistant" else ()
            said.append({name: value if name in replied else spelt(tokenizer, value) for name, value in each.items()})
        tools, arguments = spelt(tokenizer, tools), {"add_generation_prompt": True, **own, **spelt(tokenizer, given)}
        text: str = tokenizer.apply_chat_template(said, tools=tools, **arguments, tokenize=False)
        words = left_out(tokenizer, said, tools, **arguments)
    except (OverTime, MemoryError):
        raise
    except Exception as error:  # whatever the operator's template makes of somebody's messages is about these
        wrong = f"{type(error).__name__}: {error}"[:400]
        raise ConfigError(f"messages must suit the model's chat template, got {wrong}. Correct them") from error
    if words is not None:
        raise ConfigError(
            f"messages and tools must suit the model's chat template, which leaves out {words}. Leave it out, or say it in a "
            "message of another role"
        )
    return text


def _behind(
    tokenizer: Any, depth: int, messages: list[Any], tools: Any = None, own: Any = _NONE, given: Any = _NONE
) -> str | None:
    args = {"add_generation_prompt": True, **own, **spelt(tokenizer, given), "tools": spelt(tokenizer, tools)}
    try:
        return Chat(tokenizer, "messages", (), args).behind(messages[:depth], messages[depth:])
    except RowError:
        return None


def _encode(tokenizer: Any, text: str, special: bool, after: int | None, marked: bool) -> np.ndarray | None:
    def tokens_of(text: str) -> np.ndarray:
        if marked:
            return encoded(tokenizer, text)
        return np.asarray(tokenizer(text, add_special_tokens=special)["input_ids"], np.int32)

    tokens, says = tokens_of(text), without_marks(text) if marked else text
    if after is None:
        return tokens
    if _goes_on(tokenizer, tokens, after, says):
        return tokens
    # It sets a space before what begins a text: there a line may begin instead, whose tokens are left out again.
    line, tokens = tokens_of("\n"), tokens_of("\n" + text)
    found = tokens[len(line) :]
    return found if np.array_equal(tokens[: len(line)], line) and _goes_on(tokenizer, found, after, says) else None


def _goes_on(tokenizer: Any, tokens: np.ndarray, after: int, text: str) -> bool:
    """Whether these say the text behind that token: its beginning is where the two meet."""
    said = text_of(tokenizer, tokens[:8], after=after).rstrip(REPLACEMENT)
    return bool(said) and text.startswith(said)
