"""Which form journals and dumps of the index have, and how those of older releases are read.

Owns the number of the form and the ways from every older one to today's; not what is in a dump (`index.py`) or a line
(`journal.py`). A dump names its format and the release that wrote it; the events behind a snapshot have the snapshot's. Format 0
is what was written before there was a number.

    index.dump()            -> {"format": 5, "release": "0.1.0", "attempt": 0, ...}
    state_of(dump, path)    -> the same in today's form; ConfigError in one line where a newer release wrote it

Since format 4 a put is journalled as its record's own bytes (`puts.py`); before, field by field as the index takes it.
Since format 5 the journal says which step a trainable role was told to leave.

Invariant: a field that an older dump does not have is left out here too, and begins as in a new index; so only what changed its
form needs a step in `_STATES` or `_EVENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rondo.runtime import formats

FORMAT = 5

NOTHING = "nothing"
"""The event that what has no meaning any more becomes."""

Fields = dict[str, Any]


def _rows_of_0(spans: list[list[int]]) -> list[list[int]]:
    """Of format 0, [group, first sample, how many]: samples had one part."""
    return [[group, 0, first, count] for group, first, count in spans]


def _round_of_0(made: Fields) -> Fields:
    return {**made, "turn": made["index"], "spans": [_rows_of_0(spans) for spans in made["spans"]]}


def _group_of_0(group: Fields) -> Fields:
    extents = [[columns, 0, first, count, place] for columns, first, count, place in group["parts"]]
    return {name: value for name, value in group.items() if name != "parts"} | {"extents": extents}


def _state_of_0(state: Fields) -> Fields:
    lanes = {
        name: {**lane, "rounds": [_round_of_0(made) for made in lane["rounds"]]}
        for name, lane in state["rounds"]["lanes"].items()
    }
    groups = [_group_of_0(group) for group in state["groups"]]
    checksums = {} if state["version"] is None else {"actor": state["checksum"]}
    return {**state, "groups": groups, "rounds": {**state["rounds"], "lanes": lanes}, "checksums": checksums}


def _event_of_0(event: Fields) -> Fields:
    if event["event"] == "commit":
        return {**event, "role": "actor", "spans": _rows_of_0(event["spans"])}
    if "spans" in event:
        return {**event, "spans": _rows_of_0(event["spans"])}
    if event["event"] == "rounds":
        return {**event, "rounds": [_round_of_0(made) for made in event["rounds"]]}
    return event


def _info_of_1(info: list[list[Any]]) -> list[list[Any]]:
    """Of format 1, without how a response ended: those that a group's samples have; media have one field alone."""
    return [*info, [0] * len(info[0])] if len(info) == 5 else info


def _state_of_1(state: Fields) -> Fields:
    return {**state, "groups": [{**group, "info": _info_of_1(group["info"])} for group in state["groups"]]}


def _event_of_1(event: Fields) -> Fields:
    return {**event, "info": _info_of_1(event["info"])} if "info" in event else event


def _state_of_2(state: Fields) -> Fields:
    """Of format 2, with partitions, which have a journal of their own."""
    return {name: value for name, value in state.items() if name != "partitions"}


def _event_of_2(event: Fields) -> Fields:
    return event if event["event"] != "part" else {"event": NOTHING}


_STATES: tuple[Callable[[Fields], Fields], ...] = (_state_of_0, _state_of_1, _state_of_2)
"""Step i makes a dump of format i one of format i + 1."""
_EVENTS: tuple[Callable[[Fields], Fields], ...] = (_event_of_0, _event_of_1, _event_of_2)
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
