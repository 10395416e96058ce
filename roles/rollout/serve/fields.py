"""Fields: what a JSON body asks for, read name by name, so that nothing that would change the answer is overlooked.

Owns the types of fields and the words for wrong ones. Does not own which fields there are: the dialects do.

    fields = Fields(body, "the body")
    top_p = fields.number("top_p", 1.0)
    fields.off("presence_penalty", 0)           # may be sent, at the value that changes nothing
    fields.refuse_rest(IGNORED)                 # ConfigError for any other name
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

import orjson
from aiohttp import web

from rondo.runtime.errors import ConfigError


class Fields:
    """The fields of one JSON object that are still to be read. A null stands for a field that is not there."""

    def __init__(self, body: Any, what: str) -> None:
        if not isinstance(body, dict):
            raise ConfigError(f"{what} must be a JSON object, got {type(body).__name__}. Send one")
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []
        self._what = what

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it came."""
        self._known.append(name)
        return self._left.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value

    def integer(self, name: str, default: Any = None, *, least: int | None = None) -> Any:
        value = self.take(name, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise _wrong(name, "an integer", value)
        if value is not None and least is not None and value < least:
            raise _wrong(name, f"at least {least}", value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _wrong(name, "a number", value)
        return float(value)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.take(name, default)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, "text", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """One text or a list of them, none empty."""
        value = self.take(name, ())
        found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (None,)
        if not all(isinstance(text, str) and text for text in found):
            raise _wrong(name, "text or a list of texts", value)
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them."""
        value = self.take(name, ())
        found = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in found):
            raise _wrong(name, "an integer or a list of integers", value)
        return found

    def off(self, name: str, *neutral: Any, why: str = "this server does not support it") -> None:
        """A field that may only be sent with a value that changes nothing."""
        value = self.take(name)
        if value is not None and not any(value == each for each in neutral):
            allowed = "must be " + " or ".join(map(_shown, neutral)) if neutral else "must not be set"
            raise ConfigError(f"{name} {allowed}, since {why}, got {_shown(value)}. Remove it")

    def refuse_rest(self, ignored: Collection[str] = ()) -> None:
        """ConfigError for a field that nobody read and that may not be ignored."""
        for name in self._left:
            if name not in ignored:
                near = difflib.get_close_matches(name, [*self._known, *ignored], n=1)
                advice = f"Did you mean {near[0]!r}?" if near else "Remove it"
                raise ConfigError(f"{self._what} must have known fields only, got {name!r}. {advice}")


async def read_body(request: web.Request) -> Any:
    """The body as JSON; an empty one is {}. ConfigError for anything else."""
    content = await request.read()
    try:
        return orjson.loads(content) if content else {}
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"the body of {request.path} must be JSON, got {error}. Correct it") from error


def _wrong(name: str, rule: str, value: Any) -> ConfigError:
    return ConfigError(f"{name} must be {rule}, got {_shown(value)}. Correct it")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
