"""Points: what metrics.jsonl says, as (number, step, {name: value}), each (step, name) once.

Owns which records are points, their names and their numbers. Does not own where they go. A `Points` is a place in the file: what
it reads next follows from the bytes before it alone, so that whoever reads the file again gets the same points with the same
numbers. A step that is told again keeps the figures of its first time, unless the run went back
behind it.

    step records      -> train/loss, train/reward_mean, ...          at their step
    critic's          -> critic/...                                  at theirs
    of a process      -> rollout-0/engine/..., supervisor/memory_bytes/...   once a step, at the newest one
    evaluations       -> evaluation/reward, evaluation/pass@1, ...   at the steps trained by then
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.bus.evaluations import ASKED
from rondo.launch.metrics.exposition import process_of
from rondo.launch.report.records import evaluation_figures, is_step
from rondo.runtime.checkpoints import GOES_ON
from rondo.runtime.records.tail import Tail

_NO_FIGURES = ("time", "step", "version", "rank", "waits_s", "critic", "evaluation")
PIECE_BYTES = 1 << 18
"""Of the file that is read at once."""

log = logging.getLogger("rondo.track")


@dataclass(frozen=True, slots=True)
class Point:
    """`number` counts the points of a run from 1. `time` in seconds since the epoch."""

    number: int
    step: int
    time: float
    values: Mapping[str, float]
    went_back_to: int | None = None
    """The version that the run went back to before this point: those of later steps are of a branch that it has left."""


class Points:
    """A place in a metrics.jsonl that may still grow: at its beginning, or where `state` says."""

    def __init__(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._offset: int = 0 if state is None else state["offset"]
        self.number: int = 0 if state is None else state["number"]
        self._steps: dict[str, int] = {} if state is None else dict(state["steps"])
        self._evaluated: set[int] = set() if state is None else set(state["evaluated"])
        self._back: int | None = None if state is None else state.get("back")

    def state(self) -> dict[str, Any]:
        """As JSON, to begin here again."""
        evaluated = sorted(self._evaluated)
        back = {} if self._back is None else {"back": self._back}
        return {"offset": self._offset, "number": self.number, "steps": self._steps, "evaluated": evaluated} | back

    def read(self, most: int = PIECE_BYTES) -> list[Point]:
        """The next points, of so many bytes at most. A line that is still written is left for later."""
        tail = Tail(self._path, self._offset)
        lines = tail.read(most)
        if tail.shrunk:
            return []
        self._offset = tail.offset
        return [point for line in lines for point in self._points(line)]

    def _points(self, line: bytes) -> Iterator[Point]:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not line.isspace():
                log.warning("%s has a torn line, which is left out", self._path)
            return
        try:
            every, at = list(_series(record)), float(record["time"])
            parts = [(name, None if of is None else int(of), told) for name, of, told in every]
        except (AttributeError, KeyError, TypeError, ValueError):
            log.warning("%s has a line that is no record of a run, which is left out", self._path)
            return
        if GOES_ON in record:
            self._back = back = int(record[GOES_ON])
            self._steps = {name: min(step, back - 1) for name, step in self._steps.items()}
            self._evaluated = {version for version in self._evaluated if version <= back}
        for series, told_of, figures in parts:
            # A process tells of itself now and then: at the newest step.
            step = self._steps.get("train", 0) if told_of is None else told_of
            if series == "evaluation":
                is_new = step not in self._evaluated
                self._evaluated.add(step)
            else:
                is_new = step > self._steps.get(series, -1)
                self._steps[series] = max(step, self._steps.get(series, -1))
            values = dict(_numbers(figures, f"{series}/", () if told_of is None else _NO_FIGURES))
            if is_new and values:
                self.number += 1
                yield Point(self.number, step, at, values, self._back)
                self._back = None


def _series(record: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Mapping[str, Any]]]:
    if is_step(record):
        yield "train", record["step"], record
    elif "source" in record:
        yield from _of_process(record, process_of(record))
    if "critic" in record:
        yield "critic", record["critic"]["step"], record["critic"]
    if "evaluation" in record and not record["evaluation"].get("label", "").startswith(ASKED):
        told = record["evaluation"]
        counts = {name: told[name] for name in ("reward", "num_samples", "num_failed") if name in told}
        yield "evaluation", told["version"], counts | evaluation_figures(told)


def _of_process(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, None, Mapping[str, Any]]]:
    """What a process tells of itself, part by part, since several may tell of the same step."""
    for part, figures in tree.items():
        if part in _NO_FIGURES or not isinstance(figures, Mapping):
            continue
        if figures and all(isinstance(inner, Mapping) for inner in figures.values()):
            yield from _of_process(figures, f"{prefix}/{part}")
        else:
            yield f"{prefix}/{part}", None, figures


def _numbers(tree: Mapping[str, Any], prefix: str, but: Collection[str] = ()) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if name in but:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name.replace(" ", "/"), float(value)
