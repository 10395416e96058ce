"""Which form journals and dumps of the index have, and how those of older releases are read.

Owns the number of the form and the ways from every older one to today's; not what is in a dump (`index.py`) or a line
(`journal.py`). A dump names its format and the release that wrote it; the events behind a snapshot have the snapshot's. Format 0
is what was written before there was a number.

    index.dump()            -> {"format": 1, "release": "0.1.0", "attempt": 0, ...}
    state_of(dump, path)    -> the same in today's form; ConfigError in one line where a newer release wrote it

Invariant: a field that an older dump does not have is left out here too, and begins as in a new index; so only what changed its
form needs a step in `_STATES` or `_EVENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rondo.runtime import formats

FORMAT = 1

Fields = dict[str, Any]
_STATES: tuple[Callable[[Fields], Fields], ...] = (lambda state: state,)
"""Step i makes a dump of format i one of format i + 1."""
_EVENTS: tuple[Callable[[Fields], Fields], ...] = (lambda event: event,)
"""Likewise for the events of a journal."""


def stamp() -> Fields:
    """What a dump says of its own form."""
    return formats.stamp(FORMAT)


def format_of(state: Mapping[str, Any], where: object) -> int:
    """The format of a dump that lies `where`. ConfigError when only a newer release can read it."""
    return formats.check(state, FORMAT, where)


def state_of(state: Fields, where: object) -> Fields:
    """A dump of any older format in today's. ConfigError as of `format_of`."""
    for step in _STATES[format_of(state, where) :]:
        state = step(state)
    return state


def event_of(event: Fields, number: int) -> Fields:
    """An event that was written in format `number`, in today's."""
    for step in _EVENTS[number:]:
        event = step(event)
    return event
