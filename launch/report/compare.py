"""`rondo compare RUN_A RUN_B`: what two runs were made of, where they part, and what came out of each.

Owns the comparison of settings, code, packages, data, machine, metrics and figures. Does not own the one to the bit, of runs
that are deterministic (`diff.py`), whose word counts where both have it.

Invariant: figures that depend on time (seconds, and what waits at the moment) are never a difference of metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rondo.launch.manifest import gathered, parted
from rondo.launch.progress import at_work
from rondo.launch.report.diff import first_difference, show_diff
from rondo.launch.report.records import print_json, step_records
from rondo.launch.report.summary import read
from rondo.launch.rundir import existing_run, read_json
from rondo.roles.training.parity import FOLDER as PARITY

_FIGURES = (
    "exit_code",
    "steps",
    "reward_before",
    "reward_after",
    "samples_trained",
    "samples_lost",
    "wall_s",
    "first_step_s",
)
_LAST = ("reward_mean", "loss", "entropy", "kl", "grad_norm", "step_s")
_MANY = 20
_WIDTH = 60
_TIMED = re.compile(r"^time$|^mfu$|_s$|_per_s_|^queues|^rings")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step whose metrics are not equal: metric -> its two values. `step` None: none of `num_steps` that both have."""

    num_steps: int
    step: int | None
    metrics: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`made`: part (settings, code, ...) -> what differs in it -> two values; `figures` of the ends, equal ones too; `bits`:
    where deterministic runs part, in words; empty where they do not, None where one is not deterministic."""

    made: Mapping[str, Mapping[str, Sequence[Any]]]
    metrics: Parting
    figures: Mapping[str, Sequence[Any]]
    bits: str | None

    @property
    def parts(self) -> bool:
        return self.metrics.step is not None if self.bits is None else bool(self.bits)


def compare(first: Path, second: Path) -> Comparison:
    runs = (first, second)
    ours, theirs = (read_json(run / "config.resolved.json") for run in runs)
    a, b = (gathered(run) for run in runs)
    made = {
        part: {n: pair for n, *pair in parted(a[part], b[part])} for part in ("code", "packages", "data", "machine")
    }
    steps = [step_records(run / "metrics.jsonl") for run in runs]
    bits = None
    if all((run / PARITY).is_dir() for run in runs):
        bits = first_difference(first, second) or ""
    settings = {name: pair for name, *pair in parted(ours, theirs) if name not in ("name", "run_dir")}
    settings |= {f"changed {name}": pair for name, *pair in parted(a["changes"], b["changes"])}
    return Comparison({"settings": settings} | made, _parting(*steps), _figures(runs, steps), bits)


def _parting(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> Parting:
    by_step = {record["step"]: record for record in theirs}
    common = [(record, by_step[record["step"]]) for record in ours if record["step"] in by_step]
    for a, b in common:
        names = [name for name in a.keys() | b.keys() if _TIMED.search(name) is None]
        if unequal := {name: (a.get(name), b.get(name)) for name in sorted(names) if a.get(name) != b.get(name)}:
            return Parting(len(common), a["step"], unequal)
    return Parting(len(common), None, {})


def _figures(runs: Sequence[Path], steps: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[Any]]:
    summaries = [read(run) for run in runs]
    found: dict[str, list[Any]] = {name: [getattr(each, name, None) for each in summaries] for name in _FIGURES}
    found["restarts"] = [None if each is None else sum(each.restarts.values()) for each in summaries]
    found |= {f"last {name}": [of[-1].get(name) if of else None for of in steps] for name in _LAST}
    return {name: pair for name, pair in found.items() if pair != [None, None]}


def lines(names: Sequence[str], found: Comparison) -> list[str]:
    """The comparison as text, `names` of the runs."""
    text = []
    for part, unequal in found.made.items():
        text.append(f"{part}: " + (f"{len(unequal)} differ" if unequal else "equal"))
        text += [f"  {name}: {_short(a)} | {_short(b)}" for name, (a, b) in list(unequal.items())[:_MANY]]
        text += [f"  ... {len(unequal) - _MANY} more: --json has all"] * (len(unequal) > _MANY)
    metrics = found.metrics
    if metrics.step is None:
        text.append(f"metrics: equal in all {metrics.num_steps} steps that both have")
    else:
        text.append(f"metrics: part in step {metrics.step}, in {len(metrics.metrics)} of them")
        text += [f"  {name}: {_short(a)} | {_short(b)}" for name, (a, b) in list(metrics.metrics.items())[:_MANY]]
    if found.bits is not None:
        text.append(f"to the bit: {found.bits or 'equal in all steps: ids, rows and weights'}")
    if found.figures:
        text += ["", f"{'at the end':<20}{names[0]:<24}{names[1]}"]
    return text + [f"{name:<20}{_short(a):<24}{_short(b)}" for name, (a, b) in found.figures.items()]


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def show(first: Path, second: Path, *, ids_only: bool = False, as_json: bool = False) -> int:
    """0 where the runs trained the same, as far as they tell; 1 where they part. ConfigError for what is no run, and with
    `ids_only` for a run that is not deterministic."""
    first, second = existing_run(first), existing_run(second)
    if ids_only:
        return show_diff(first, second, ids_only=True)
    with at_work(f"compares {first.name} and {second.name}"):
        found = compare(first, second)
    if as_json:
        print_json(asdict(found))
    else:
        print("\n".join(lines((first.name, second.name), found)))
    return int(found.parts)
