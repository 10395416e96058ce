"""Reading back what a run wrote: the lines of metrics.jsonl and events.jsonl.

Owns which records count, and the shape that a record must have; `runtime/records/record.py` writes, and says which lines are
whole. Invariant: no reader here fails because of what a line holds. A line of another shape is left out and counted in a warning.

A run that goes on from a checkpoint writes down from which version: what was told before of later steps is of a branch that it
has left, and counts no more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.bus.evaluations import ASKED
from rondo.runtime.checkpoints import GOES_ON
from rondo.runtime.records.record import read_lines
from rondo.runtime.records.tail import Tail

_NUMBER = (int, float, type(None))
_COUNT = (int, float)
_NUMBERS = {"": _NUMBER}
_SHAPES: dict[str, Any] = {
    "time": _COUNT, "source": str, "kind": str, "job": str, "step": int, "reward_mean": _NUMBER, "loss": _NUMBER,
    "num_samples": _COUNT, "num_failed": _COUNT, "skipped": _COUNT, "longest_wait_s": _NUMBER, "waits_s": _NUMBERS,
    "staleness_tokens": _NUMBERS, GOES_ON: int, "left_out": _NUMBERS, "critic": {"step": int, "explained_variance": _NUMBER},
    "evaluation": {
        "version": int, "label": str, "reward": _NUMBER, "num_samples": _COUNT, "num_failed": _COUNT, "figures": _NUMBERS,
        "sets": {"": _NUMBERS},
    },
}  # fmt: skip
"""Of the fields that readers calculate with: types, or the shapes of a table's fields, of which "" stands for all others."""
_FIGURES = ("log_prob_gap", "reward_mean_", "response_tokens_", "clip_fraction_", "num_samples_")
"""What names of further numbers begin with, such as those of a modality."""


def _fits(value: Any, shape: Any) -> bool:
    if not isinstance(shape, dict):
        return isinstance(value, shape) and not isinstance(value, bool)
    known = (
        ((part, shape.get(name, shape.get(""))) for name, part in value.items()) if isinstance(value, dict) else None
    )
    return known is not None and all(of is None or _fits(part, of) for part, of in known)


def is_record(value: Any) -> bool:
    """Whether a line's value has the shape of a record, of a step, an evaluation, a process or an event."""
    return (
        _fits(value, _SHAPES)
        and all(_fits(number, _NUMBER) for name, number in value.items() if name.startswith(_FIGURES))
        and all(name in value.get(part, (name,)) for part, name in (("evaluation", "version"), ("critic", "step")))
        and (not is_step(value) or ("time" in value and ("reward_mean" in value or "loss" in value)))
    )


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file, oldest first; nothing when there is no file. Lines of another shape are left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        yield from read_lines(file, path, is_record)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first, without those of steps and evaluations that the run went back behind."""
    cuts, newest = list[tuple[int, int]](), 0
    for place, record in enumerate(read_records(path)):
        back = goes_back_to(record, newest)
        if back is not None:
            cuts.append((place, back))
        newest = newest if back is None else back
        newest = max(newest, record["step"] + 1 if is_step(record) else 0)
    for at in range(len(cuts) - 2, -1, -1):  # the least version of this cut and those behind it
        cuts[at] = cuts[at][0], min(cuts[at][1], cuts[at + 1][1])
    left = iter([*cuts, (-1, 0)])
    until, version = next(left)
    for place, record in enumerate(read_records(path)):
        if place == until:
            until, version = next(left)
        if until < 0 or not is_behind(record, version):
            yield record


def goes_back_to(record: Mapping[str, Any], newest: float) -> int | None:
    """The version that a run of `newest` steps goes back to with this record of its metrics.jsonl; None where it does not: where
    it goes on from a checkpoint, or a step is trained again."""
    if GOES_ON in record:
        return int(record[GOES_ON])
    return int(record["step"]) if is_step(record) and record["step"] < newest else None


def is_behind(record: Mapping[str, Any], version: float) -> bool:
    """Whether a record tells of a step, or of an evaluation, that a run which went back to `version` has yet to come to."""
    step = record.get("critic", record).get("step", -1) if "evaluation" not in record else -1
    return bool(step >= version or record.get("evaluation", {}).get("version", -1) > version)


def last_records(path: Path, num_bytes: int, num: int = 0) -> list[dict[str, Any]]:
    """Those at the end of a JSONL file, in its last bytes, the newest `num` (0: all) of them, oldest first."""
    before = max(0, path.stat().st_size - num_bytes) if path.exists() else 0
    lines = Tail(path, before).read(num_bytes)
    return list(read_lines(lines[before > 0 :][-num:], path, is_record))


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether it tells of a trained step: of rewards, or in a job without rollouts of a loss alone."""
    return "step" in record and ("reward_mean" in record or "job" in record)


def step_records(path: Path) -> list[dict[str, Any]]:
    """One record a step, in order of steps. A step that ran again after a restart counts as its last run."""
    steps = {record["step"]: record for record in read_metrics(path) if is_step(record)}
    return [steps[step] for step in sorted(steps)]


def evaluation_records(path: Path) -> list[dict[str, Any]]:
    """One evaluation a policy version, in order of versions: {"version", "reward", "num_samples", "num_failed", "sets"}.
    One that was made again after a restart counts as its last; those that somebody asked for do not, of whichever sets. Of a job
    without rollouts a version has what was measured of its loss and of its answers in one."""
    every = (record["evaluation"] for record in read_metrics(path) if "evaluation" in record)
    found = (record for record in every if not record.get("label", "").startswith(ASKED))
    versions = dict[int, dict[str, Any]]()
    for record in found:
        before = versions.get(record["version"], {})
        told = {name: value for name, value in record.items() if value is not None or name not in before}
        versions[record["version"]] = before | told
    return [versions[version] for version in sorted(versions)]


def print_json(data: Any) -> None:
    """What a command finds, for a program that reads its stdout."""
    sys.stdout.buffer.write(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")


def shown_reward(mean: float | None, record: Mapping[str, Any]) -> str:
    """The mean reward of a step or an evaluation as text, with how many of its samples have none because their reward failed."""
    failed = record.get("num_failed", 0)
    text = "-" if mean is None else f"{mean:.3f}"
    return f"{text} (of {record['num_samples']}, {failed} failed)" if failed else text


def evaluation_figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """mean@k and pass@k of an evaluation by "set pass@k", without the set's name where it is the only one; of a job without
    rollouts what it measures."""
    sets = evaluation.get("sets", {})
    return evaluation.get("figures", {}) | {
        figure if len(sets) == 1 else f"{name} {figure}": value
        for name, figures in sets.items()
        for figure, value in figures.items()
        if "@" in figure
    }
