"""Evaluations of a run: which are due, who works on them, and which weights are kept for them.

Owns the decisions, read off the index, and who was given what, which no journal keeps: a new coordinator gives it out again. Does
not own results and pins (`index.py`), nor what is evaluated.

    "start", "end"    of version 0 and of the last one: in parts, one for each engine that the run begins with, as leases are
    "version_<n>"     every so many steps, beside the training: by one replica, from a slot that is kept for it
    "asked-<id>"      by somebody, one at a time, beside the training too: of a version that a slot has by chance, once. Who asked
                      knows of it and asks again for how it is, also a coordinator that has not heard of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event
from rondo.runtime.errors import ConfigError, Refused

ASKED = "asked-"
"""How labels of evaluations begin that somebody asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Sets by name, and the version; None: the newest that is published."""

    sets: tuple[str, ...]
    version: int | None


@dataclass(frozen=True, slots=True)
class Evaluations:
    index: Index
    is_living: Callable[[str, int], bool]  # member, incarnation
    start: bool
    end: bool
    every: int | None  # steps
    num_pinned: int  # versions that the slab keeps
    num_parts: int
    _holders: dict[str, tuple[str, int]] = field(default_factory=dict)  # label -> (member, incarnation)
    _parts: dict[tuple[str, int], tuple[str, int, int]] = field(default_factory=dict)  # with the rank
    _asked: dict[str, Asked] = field(default_factory=dict)  # label -> what is asked; those without a result

    def due(self) -> str | None:
        """The label of the one that comes before any lease, or after the last."""
        if self.start and self.index.version == 0 and "start" not in self.index.evaluations:
            return "start"
        if self.end and self.index.done and "end" not in self.index.evaluations:
            return "end"
        return None

    def missing(self) -> dict[str, int]:
        """Label -> committed version, of the evaluations beside the training that have no result."""
        if self.every is None:
            return {}
        due = {
            f"version_{version}": version for version in range(self.every, (self.index.version or 0) + 1, self.every)
        }
        # The evaluation at the end is that of the last version.
        at_end = self.index.rules.num_steps if self.end else None
        return {label: v for label, v in due.items() if label not in self.index.evaluations and v != at_end}

    def part_of(self, label: str, version: int, who: tuple[str, int, int]) -> dict[str, Any] | None:
        """A part of an evaluation that no living engine works on, or the one that it was given; there is one for each engine that
        the run begins with. Once all are there, they are a part themselves: to be put together."""
        found, of = self.index.evaluation_parts.get(label, {}), self.num_parts
        left = [part for part in range(of) if str(part) not in found] or [of]
        holders = {part: self._parts.get((label, part)) for part in left}
        free = [part for part, holder in holders.items() if holder is None or not self.is_living(*holder[:2])]
        part = next((part for part in left if holders[part] == who), free[0] if free else None)
        if part is None:
            return None
        self._parts[label, part] = who
        due = {"label": label, "version": version, "part": part, "of": of}
        return {"evaluate": due | ({"parts": list(found.values())} if part == of else {})}

    def beside(self, member: str, incarnation: int) -> str | None:
        """The label of one beside the training whose weights are there, and that no other living member works on."""
        for label in (*self.index.versions.pins, *self.asked()):
            holder = self._holders.get(label, (member, incarnation))
            if holder == (member, incarnation) or not self.is_living(*holder):
                self._holders[label] = (member, incarnation)
                return label
        return None

    def ask(self, label: str, asked: Asked) -> dict[str, Any]:
        """How an evaluation is that somebody asks for, now or again: {"status"}, with its "result" where it has one. ConfigError
        for a version that is not held, Refused while another one is asked for, or nothing is published."""
        if label in self.index.evaluations:
            found = self.index.evaluations[label]
            return {"status": "FAILED" if "skipped" in found else "COMPLETED", "result": found}
        if label not in self._asked:
            for other in self.asked():
                raise Refused(f"an evaluation must be asked for alone, got {other} without a result. Ask again then")
            if (slot := self._slot(asked)) is None and asked.version is not None:
                held = sorted({each.version for each in self.index.versions.slots if each.state == "ready"})
                raise ConfigError(
                    f"version must be one whose weights are held ({', '.join(map(str, held)) or 'none now'}), got "
                    f"{asked.version}. Evaluate its checkpoint with `rondo eval`"
                )
            if slot is None:
                raise Refused(
                    "weights must be published to be evaluated beside the training, got none. Ask again later"
                )
            self._asked[label] = asked
        return {"status": "RUNNING" if label in self._holders else "PENDING"}

    def asked(self) -> dict[str, Asked]:
        """Those that are asked for, and have no result: one, or none."""
        for label in self._asked.keys() & self.index.evaluations.keys():
            del self._asked[label]
        return self._asked

    def lost(self) -> Iterator[tuple[str, str]]:
        """Labels that are asked for and get no result, and why: nobody is to die of one again and again."""
        for label, asked in self.asked().items():
            holder = self._holders.get(label)
            if holder is not None and not self.is_living(*holder):
                yield label, f"{holder[0]}, which worked on it, ended"
            elif holder is None and self._slot(asked) is None:
                yield label, "its weights are gone: a newer version has taken their place"

    def place(self, label: str) -> dict[str, Any]:
        """Where the weights are of one that `beside` said, and what is asked of it."""
        asked = self._asked.get(label)
        slot = self._slot(asked) if asked is not None else self.index.versions.pins[label]
        assert slot is not None
        ready = self.index.versions.slots[slot]
        told = {"slot": slot, "version": ready.version, "checksum": ready.checksum, "attempt": self.index.attempt}
        return told if asked is None else told | {"sets": list(asked.sets)}

    def _slot(self, asked: Asked) -> int | None:
        versions = self.index.versions
        if asked.version is None:
            return versions.newest
        slots = enumerate(versions.slots)
        return next((i for i, each in slots if each.state == "ready" and each.version == asked.version), None)

    def keep(self, slot: int, version: int) -> Iterator[Event]:
        """Events, each to be applied before the next is asked for, that pin what is to be evaluated of the version in a slot.
        What has no slot, or lost its weights with the attempt, is told and left out."""
        for label, due in self.missing().items():
            pins = self.index.versions.pins
            if label in pins or due > version:
                continue
            # After the last version nothing is written any more: it waits for its turn where it is.
            if due == version and (len(pins) < self.num_pinned or self.index.done):
                yield {"event": "pin", "label": label, "slot": slot}
                continue
            why = "its weights are gone, with the process or the run that held them"
            if due == version:
                why = f"the evaluation of {', '.join(pins)} still runs; raise evaluation.every or evaluation.share"
            yield {"event": "evaluated", "label": label, "result": {"version": due, "skipped": why}}
