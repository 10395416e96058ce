"""Reading back what a run wrote: the lines of metrics.jsonl and events.jsonl.

Owns the reading only; `runtime/record.py` writes. A run may be alive, or may have died in the middle of a line: a last
line without its end is left out, any other line that is not JSON is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.errors import CorruptData


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file, oldest first; nothing when there is no file. CorruptData for a broken line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise CorruptData(f"{path}:{number} must be a line of JSON, got {error}. Remove the line") from error
            yield record


def step_records(path: Path) -> list[dict[str, Any]]:
    """One record a step, in order of steps. A step that ran again after a restart counts as its last run."""
    steps = {record["step"]: record for record in read_records(path) if "step" in record and "reward_mean" in record}
    return [steps[step] for step in sorted(steps)]


def evaluation_records(path: Path) -> list[dict[str, Any]]:
    """One evaluation a policy version, in order of versions: {"version", "reward", "num_prompts", "sets"}. One that was made
    again after a restart counts as its last."""
    found = (record["evaluation"] for record in read_records(path) if "evaluation" in record)
    versions = {record["version"]: record for record in found}
    return [versions[version] for version in sorted(versions)]


def evaluation_figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """mean@k and pass@k of an evaluation by "set pass@k", without the set's name where it is the only one."""
    sets = evaluation.get("sets", {})
    return {
        figure if len(sets) == 1 else f"{name} {figure}": value
        for name, figures in sets.items()
        for figure, value in figures.items()
        if "@" in figure
    }
