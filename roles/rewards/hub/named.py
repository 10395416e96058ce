r"""What holds for every reward of the hub that judges answers: a thought is no answer.

Owns the one place at which thoughts are cut off, and the argument `as_published`. Does not own where in the rest the answer
stands (`answers.py`). Imports the standard library alone.

    @named(writes=str)
    def exact(response, label, *, prompt, metadata): ...

    exact("<think>71? No.</think> 72", "72", prompt="6 * 12", metadata={})    # judges "72"

Invariant: the answer is what stands behind the last thought. A response that ends inside a thought has none.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Judge = Callable[..., Any]
_MARK = re.compile(r"<(/?)(?:think|thinking|thought)>|\[(/?)THINK\]", re.IGNORECASE)
_OPEN_END = re.compile(r"(?:<(?:think|thinking|thought)>|\[THINK\])\s*\Z", re.IGNORECASE)
_PROMPT_END = 200
"""Characters at the end of a prompt in which the mark that opens a thought may stand."""


def named(
    judge: Judge | None = None, *, writes: Callable[..., str] | None = None, published: Judge | None = None
) -> Any:
    """Make a judge of answers a reward function; a decorator, with arguments or without.

    The judge sees a response without its thoughts, and with them as `whole` if it has such a parameter. `in_thought` says whether
    the prompt has opened a thought; without it the end of the prompt does. writes: the answer that a label asks for, by the
    reward's arguments, with which labels are tried; None where labels are no answers. published: what scores in the judge's
    place with `as_published=True`.
    """
    if judge is None:
        return functools.partial(named, writes=writes, published=published)
    signature = inspect.signature(judge)
    parameters = [each for name, each in signature.parameters.items() if name != "whole"]
    for name, default in {"in_thought": None, **({"as_published": False} if published else {})}.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))

    @functools.wraps(judge)
    def reward(
        response: str, label: Any, *, prompt: Any, metadata: Any, in_thought: bool | None = None, **args: Any
    ) -> Any:
        if published is not None and args.pop("as_published", False):
            return published(response, label, prompt=prompt, metadata=metadata, **args)
        if "whole" in signature.parameters:
            args["whole"] = response
        starts_inside = ends_in_thought(prompt) if in_thought is None else in_thought
        return judge(without_thoughts(response, starts_inside), label, prompt=prompt, metadata=metadata, **args)

    reward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    reward.writes = writes  # type: ignore[attr-defined]
    return reward


def without_thoughts(response: str, starts_inside: bool = False) -> str:
    """Return what stands behind the last thought, "" if the response ends inside one. `starts_inside`: the prompt opened it."""
    start, inside = 0, starts_inside
    for mark in _MARK.finditer(response):
        inside = "/" not in mark[0]
        start = mark.end()
    return "" if inside else response[start:].lstrip() if start else response


def is_thought_mark(text: str) -> bool:
    """Return whether a text is a mark that opens or closes a thought."""
    return _MARK.fullmatch(text.strip()) is not None


def ends_in_thought(prompt: Any) -> bool:
    """Return whether a prompt, a text or messages, ends with the mark that opens a thought."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        prompt = prompt[-1]
    while isinstance(prompt, Mapping):
        prompt = prompt.get("content", prompt.get("text"))
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
            prompt = prompt[-1]
    return isinstance(prompt, str) and _OPEN_END.search(prompt[-_PROMPT_END:]) is not None
