"""The labels of a run's rows, each tried on the named rewards that score it: written as an answer, it must be right.

Owns which labels are tried and how what is wrong is told. Does not own how a reward's answers are written
(`roles/rewards/hub/named.py`), or functions of the user's, of which only the user knows.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rondo.launch.check.findings import Report
from rondo.roles.config import RewardConfig
from rondo.roles.data.datasets import Row
from rondo.roles.rewards import hub
from rondo.roles.rewards.several import OTHERWISE
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.reference import load_reference

_NUM_LABELS = 256
_SECONDS = 2.0


def look_at_labels(name: str, column: str | None, rows: Sequence[Row], reward: RewardConfig, report: Report) -> None:
    """Report labels among the first rows that no answer equals, or that do not score as right against themselves: an error if no
    label that was tried does, else a note."""
    functions = reward.function if isinstance(reward.function, dict) else {OTHERWISE: reward.function}
    try:
        judges = {key: judge for key, one in functions.items() if (judge := _named(one)) is not None}
    except ConfigError:  # the look at the function tells
        return
    if not judges or reward.per == "group":
        return
    until, tried, faults = time.monotonic() + _SECONDS, 0, list[str]()
    for row in rows[:_NUM_LABELS]:
        if time.monotonic() > until:
            break
        for judge in _judges_of(row, judges, functions, reward.by):
            tried += 1
            if (fault := _fault(judge, row, reward.args)) is not None:
                faults.append(f"{row.name}, column {column!r}: {fault}")
    if faults:
        report.add(
            "error" if len(faults) == tried else "note",
            f"{name}: {len(faults)} of {tried} labels cannot be scored as right; the first: {faults[0]}",
        )


def _named(reference: str) -> Callable[..., Any] | None:
    """Return the reward of the hub at this reference if its labels are answers."""
    if not reference.startswith(f"{hub.__name__}"):
        return None
    judge: Callable[..., Any] = load_reference(reference, "reward.function")
    return judge if getattr(judge, "writes", None) is not None else None


def _judges_of(row: Row, judges: dict[str, Any], functions: Any, by: str | None) -> Iterator[Callable[..., Any]]:
    if by is None:
        yield from judges.values()
        return
    key = row.metadata.get(by)
    key = key if isinstance(key, str) and key in functions else OTHERWISE
    if key in judges:
        yield judges[key]


def _fault(judge: Any, row: Row, args: Any) -> str | None:
    """Return what is wrong with the label of the row for this reward, None where it is right."""
    taken = {key: value for key, value in args.items() if key in inspect.signature(judge).parameters}
    score_of = functools.partial(judge, prompt=row.prompt, metadata=row.metadata, in_thought=False, **taken)
    try:
        score_of("", row.label)  # tells more of a label that is none
        score = score_of(answer := judge.writes(row.label, **taken), row.label)
    except RondoError as error:
        return str(error)
    if (score.get("accuracy", score["score"]) if isinstance(score, dict) else score) == 1:
        return None
    return (
        f"label must score as right against itself with {judge.__name__}, got {score} for {answer!r:.120}. Correct the row, or "
        "choose another reward.function"
    )
