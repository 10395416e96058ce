"""Fields: what a JSON body asks for, as models, so that nothing that would change the answer is overlooked.

Owns the words for wrong fields, and the kinds of them that have rules of their own. Does not own which fields there are: the
dialects do.

    class Body(Fields):
        off = {"presence_penalty": (0,)}            # may be sent, at a value that changes nothing
        ignored = frozenset({"user"})               # any other name is a ConfigError
        top_p: float = 1.0

    Body.of({"top_p": "x"})                         # ConfigError: top_p must be a number, got 'x'. Correct it
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from rondo.roles.serve.limits import MAX_NAME, MAX_STOP_CHARS, MAX_STOPS
from rondo.runtime.errors import ConfigError, did_you_mean

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxlevel = 2
_RULES = {
    "bool_type": "true or false", "int_type": "an integer", "float_type": "a number", "string_type": "text",
    "greater_than_equal": "at least {ge}", "greater_than": "above {gt}", "less_than_equal": "at most {le}",
    "string_too_long": "text of at most {max_length} characters", "literal_error": "one of {expected}",
    "string_pattern_mismatch": "a number of up to 9 digits",
}  # fmt: skip


class Fields(BaseModel):
    """The fields of one JSON object. A null stands for a field that is not there."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())
    off: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """What this server does not support, with the values that ask for nothing."""
    why: ClassVar[Mapping[str, str]] = {}
    """Of those that are off for a reason of their own."""
    ignored: ClassVar[frozenset[str] | None] = frozenset()
    """Names that mean nothing here; None: all that are not known."""

    @classmethod
    def of(cls, body: Any, what: str = "the body") -> Self:
        if not isinstance(body, dict):
            raise ConfigError(f"{what} must be a JSON object, got {type(body).__name__}. Send one")
        given = {name: value for name, value in body.items() if value is not None}
        for name in [name for name in cls.off if name in given]:
            require_off(name, given.pop(name), cls.off[name], cls.why.get(name))
        if cls.ignored is not None:
            known = [field.alias or name for name, field in cls.model_fields.items()]
            refuse_unknown(given, known, {*cls.ignored, *cls.off}, what)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(_words(error)) from error


def require_off(name: str, value: Any, neutral: Collection[Any], why: str | None = None) -> None:
    """ConfigError for a field with a value that would change the answer."""
    if not any(value == each for each in neutral):
        allowed = "must be " + " or ".join(map(shown, neutral)) if neutral else "must not be set"
        why = why or "this server does not support it"
        raise ConfigError(f"{name} {allowed}, since {why}, got {shown(value)}. Remove it")


def refuse_unknown(given: Collection[str], known: Collection[str], ignored: Collection[str], what: str) -> None:
    """ConfigError for a name that is neither known nor ignored."""
    for name in given:
        if name not in known and name not in ignored:
            advice = did_you_mean(name, [*known, *ignored] if len(name) <= MAX_NAME else (), "Remove it")
            raise ConfigError(f"{what} must have known fields only, got {shown(name)}. {advice}")


def _words(error: ValidationError) -> str:
    """What is wrong first."""
    first = error.errors(include_url=False)[0]
    name, found = "".join(map(str, first["loc"][:1])), first.get("ctx", {})
    if "error" in found:  # a rule of ours, which says the rest
        text = str(found["error"])
        return f"{name} {text}" if text.startswith("must ") else text
    return f"{name} must be {_RULES[first['type']].format(**found)}, got {shown(first['input'])}. Correct it"


def shown(value: Any) -> str:
    """What a caller sent, for a message: short, however long or deep it is."""
    return _SHOWN.repr(value)


def _stops(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else (None,)
    if not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"must be text or a list of texts, got {shown(value)}. Correct it")
    if len(found) > MAX_STOPS or sum(map(len, found)) > MAX_STOP_CHARS:
        rule = f"at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters together"
        raise ValueError(f"must be {rule}, got {shown(value)}. Correct it")
    return found


def _integers(value: Any) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(number) is int for number in found):
        raise ValueError(f"must be an integer or a list of integers, got {shown(value)}. Correct it")
    return found


Name = Annotated[str, Field(max_length=MAX_NAME)]
Count = Annotated[int, Field(ge=1)]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops)]
"""One text or a list of them, none empty."""
Integers = Annotated[tuple[int, ...], PlainValidator(_integers)]
"""One or a list of them."""
