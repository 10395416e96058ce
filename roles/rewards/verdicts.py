"""What a judge is asked, and what its answer says: from responses to chat messages, and from text to scores.

Owns how the user's functions of both are called, and the built-in forms of them. Runs in a killable process, as reward functions
do (`function.py`); asks nobody (`genrm.py`). Imports the standard library and orjson, and what the user's module imports.

    opened = open_verdicts(prompt="Is {response} right?", choices={"yes": 1.0, "no": 0.0})
    opened.call([ASK, ["42"], label, prompt, metadata, {}, []])  # [{"role": "user", "content": "Is 42 right?"}]
    opened.call([READ, "It is. Yes.", 1])                       # [[1.0, {}]]

Invariant: an answer has a score for each response that it is about, or it is an error, which says what was missing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import orjson

from rondo.roles.rewards.scores import RewardError, scored_group
from rondo.roles.rewards.worker import Opened, by_name
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import load_reference
from rondo.runtime.values import Encoded, encode

ASK, READ = "ask", "read"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_THINKS, _THOUGHT = "<think>", "</think>"
_SHOWN_CHARACTERS = 200
Message = dict[str, Any]


def open_verdicts(
    *,
    per: str = "response",
    prompt: str | None = None,
    template: str | None = None,
    system: str | None = None,
    choices: Mapping[str, float] = MappingProxyType({}),
    tag: str | None = None,
    bounds: Sequence[float] | None = None,
    parse: str | None = None,
    components: Mapping[str, float] = MappingProxyType({}),
) -> Opened:
    """As `GenrmConfig` has them. ConfigError for a function that cannot be called so."""
    asks, takes = _formatted(prompt, per) if template is None else _called(template, per)
    reads = _reader(choices, tag, bounds, None if parse is None else _plain(parse, "genrm.parse"), per)

    def call(item: Sequence[Any]) -> Encoded:
        if item[0] == ASK:
            return encode(_messages(asks(*item[1:]), system))
        _, text, number = item
        found = reads(text, number)
        if found is None:
            raise RewardError(
                f"a judge must say a verdict, got {_end_of(text)!r}. Say in the question how it is to end"
            )
        values = found if per == "group" else [found]
        if hasattr(values, "__len__") and len(values) != number:
            raise RewardError(f"a judge must score each of {number} responses, got {len(values)} in {_end_of(text)!r}")
        return scored_group(values, components)

    return Opened(call, lambda found: found, False, takes)


def _formatted(prompt: str | None, per: str) -> tuple[Callable[..., str], frozenset[str]]:
    def ask(responses: list[str], label: Any, given: Any, metadata: Any, more: dict[str, Any], _: list[str]) -> str:
        assert prompt is not None
        places = {**more, "prompt": text_of(given), "label": label, "metadata": metadata}
        if per == "group":
            places["responses"] = "\n\n".join(f"[{at}]\n{each}" for at, each in enumerate(responses, 1))
        else:
            places |= zip(("first", "second") if per == "pair" else ("response",), responses, strict=True)
        return prompt.format_map(places)

    return ask, frozenset({"transcript"} if per == "response" else ())


def _called(template: str, per: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    function, one = _plain(template, "genrm.template"), per == "response"
    call, _, takes = by_name(function, template, "genrm.template", "response" if one else "responses")
    return lambda responses, *rest: call(responses[0] if one else responses, *rest), takes


def _plain(reference: str, setting: str) -> Callable[..., Any]:
    function = load_reference(reference, setting)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{setting} must be a plain function, got {reference}. Write `def`")
    return function


def text_of(prompt: Any) -> str:
    """A prompt as a question shows it: the text of its only message, or each one behind its role. Media are left out."""
    if not isinstance(prompt, list):
        return str(prompt)
    said = [(str(message.get("role")), _content(message.get("content"))) for message in prompt]
    return said[0][1] if len(said) == 1 else "\n".join(f"{role}: {content}" for role, content in said)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _messages(made: Any, system: str | None) -> list[Message]:
    if isinstance(made, str):
        made = [{"role": "user", "content": made}]
    if not (isinstance(made, list) and made and all(isinstance(each, dict) and "role" in each for each in made)):
        raise RewardError(f"genrm.template must return text or chat messages, got {made!r:.80}. Correct it")
    try:
        orjson.dumps(made)
    except TypeError as error:
        raise RewardError(
            f"genrm.template must return what JSON can say, got {made!r:.80} ({error}). Convert it"
        ) from error
    return made if system is None or made[0]["role"] == "system" else [{"role": "system", "content": system}, *made]


def _reader(
    choices: Mapping[str, float],
    tag: str | None,
    bounds: Sequence[float] | None,
    parse: Callable[[str], Any] | None,
    per: str,
) -> Callable[[str, int], Any]:
    """What makes of a text the value of each response, a list of them per group; None for no verdict."""
    if parse is not None:
        return lambda text, _: parse(text)
    if tag is not None:
        inside = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL)

        def numbers(text: str, number: int) -> Any:
            found = inside.findall(_said(text))
            whole = " ".join(found) if per == "group" and len(found) == number else (found or [""])[-1]
            values = [float(each) for each in _NUMBER.findall(whole)]
            within = bounds is None or all(bounds[0] <= each <= bounds[1] for each in values)
            if not within or len(values) != number or _NUMBER.sub("", whole).strip(" \n\t,;[]"):
                return None
            return values if per == "group" else values[0]

        return numbers
    known = {_folded(word): value for word, value in choices.items()}
    either = "|".join(
        re.escape(word) if len(word) == 1 else f"(?i:{re.escape(word)})"
        for word in sorted(known, key=len, reverse=True)
    )
    words = re.compile(rf"(?<!\w)(?:{either})(?!\w)")

    def chosen(text: str, _: int) -> float | None:
        found = words.findall(_said(text))
        return known[_folded(found[-1])] if found else None

    return chosen


def _folded(word: str) -> str:
    """One letter is meant as it is written, since "a" is an article; a longer word in any case."""
    return word if len(word) == 1 else word.casefold()


def _said(text: str) -> str:
    """Without what was thought before; nothing where a thought has no end."""
    said = text.rpartition(_THOUGHT)[2]
    return "" if _THINKS in said else said


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else "..." + text[-_SHOWN_CHARACTERS:]
