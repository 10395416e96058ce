"""Fields: what a JSON body asks for, read name by name, so that nothing that would change the answer is overlooked.

Owns the types of fields and the words for wrong ones. Does not own which fields there are: the dialects do.

    fields = Fields(body, "the body")
    top_p = fields.number("top_p", 1.0)
    fields.off("presence_penalty", 0)           # may be sent, at the value that changes nothing
    fields.refuse_rest(IGNORED)                 # ConfigError for any other name
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection
from typing import Any

from rondo.roles.serve.limits import MAX_NAME, MAX_STOP_CHARS, MAX_STOPS
from rondo.runtime.errors import ConfigError

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxlevel = 2


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

    def text(self, name: str, default: str | None = None, *, most: int = MAX_NAME) -> str | None:
        """`most` characters."""
        value = self.take(name, default)
        if value is not None and (not isinstance(value, str) or len(value) > most):
            raise _wrong(name, f"text of at most {most} characters", value)
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        """One text or a list of them, none empty."""
        value = self.take(name, ())
        found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (None,)
        if not all(isinstance(text, str) and text for text in found):
            raise _wrong(name, "text or a list of texts", value)
        if len(found) > MAX_STOPS or sum(map(len, found)) > MAX_STOP_CHARS:
            raise _wrong(name, f"at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters together", value)
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
            allowed = "must be " + " or ".join(map(shown, neutral)) if neutral else "must not be set"
            raise ConfigError(f"{name} {allowed}, since {why}, got {shown(value)}. Remove it")

    def refuse_rest(self, ignored: Collection[str] = ()) -> None:
        """ConfigError for a field that nobody read and that may not be ignored."""
        for name in self._left:
            if name not in ignored:
                near = difflib.get_close_matches(name, [*self._known, *ignored], n=1)
                advice = f"Did you mean {near[0]!r}?" if near else "Remove it"
                raise ConfigError(f"{self._what} must have known fields only, got {shown(name)}. {advice}")


def _wrong(name: str, rule: str, value: Any) -> ConfigError:
    return ConfigError(f"{name} must be {rule}, got {shown(value)}. Correct it")


def shown(value: Any) -> str:
    """What a caller sent, for a message: short, however long or deep it is."""
    return _SHOWN.repr(value)
