"""Exposition: the newest numbers of a run, as families that Prometheus takes.

Owns the names there: "rondo_", the path with "_" for "/", seconds in full, "_total" behind what counts; what a description has in
braces is a label, and so is the process of what each has its own. Does not own the numbers, nor the text (`runtime/admin/`).

    newest = Newest(); newest.add(record); families(newest.told({"actor-0"}))
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rondo.launch.metrics.descriptions import Metric, describe, numbers
from rondo.launch.report.records import is_step
from rondo.runtime.admin.endpoint import Family

_NO_NAME = re.compile(r"[^a-zA-Z0-9]+")
_KINDS = ("critic", "evaluation")
Told = tuple[str, str, float]
"""Process, path, value."""


def process_of(record: Mapping[str, Any]) -> str:
    """Whom a record is from: its role group, with the rank where it is not the first."""
    rank = record.get("rank")
    return f"{record.get('source', '-')}.{rank}" if rank else str(record.get("source", "-"))


class Newest:
    """The numbers that came last: of a step, of one of the critic, of an evaluation, and of each process."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str, dict[str, float]]] = {}  # kind or process -> source, process, numbers

    def add(self, record: Mapping[str, Any]) -> None:
        """A step takes the place of the last one; what processes tell of themselves may come in parts."""
        kind = "step" if is_step(record) else next((each for each in _KINDS if each in record), None)
        process, found = process_of(record), dict(numbers(record))
        if kind is None and process in self._of:
            found = self._of[process][2] | found
        self._of[kind or process] = str(record.get("source", "-")), process, found

    def told(self, groups: Collection[str]) -> Iterator[Told]:
        """Without those of processes of role groups that are no more."""
        for kind, (source, process, found) in self._of.items():
            if source in groups or source == "supervisor" or kind in ("step", *_KINDS):
                yield from ((process, path, value) for path, value in found.items())


def families(told: Iterable[Told]) -> list[Family]:
    """Each name once, in the order in which they came first."""
    found: dict[str, Family] = {}
    for process, path, value in told:
        known = describe(path)
        if known is None:  # of a function of the user's
            name, labels = _name(path), {}
            family = found.setdefault(name, Family(name, "untyped", "Measured by a function of this run's own.", {}))
        else:
            entry, labels = known[0], dict(known[1])
            if entry.of_process:
                labels["process"] = process
            name = name_of(entry)
            family = found.setdefault(name, Family(name, "counter" if entry.counts else "gauge", help_of(entry), {}))
        family.samples[tuple(sorted(labels.items()))] = value
    return list(found.values())


def name_of(entry: Metric) -> str:
    """The family of a metric."""
    name = _name(re.sub(r"{\w+}", "", entry.name))
    return f"{name}_total" if entry.counts else name


def help_of(entry: Metric) -> str:
    return f"{entry.text} ({entry.unit})."


def _name(path: str) -> str:
    name = re.sub("_per_s(?=_|$)", "_per_second", "rondo_" + _NO_NAME.sub("_", path).strip("_"))
    return re.sub("_s$", "_seconds", name)
