"""What a curriculum and a mixture bring: steps of the quick start's task to equal reward, in data of which most teach nothing.

    rondo bench curriculum [--names plain curriculum mixture dynamic dynamic_curriculum] [--seeds 0 1 2] [--steps 80]

The data are those of `examples/curriculum.py`: a third of the rows are to be sorted, a third have a wrong answer and a third an
answer that is known already; where all rows teach, nothing can rest. `plain` takes them as one source, `curriculum` lets solved
and hopeless rows rest, `mixture` takes eight of ten prompts from those to sort; `dynamic` leaves groups of equal rewards out
(`rollout.filter`), so that each step has as many that teach, and `dynamic_curriculum` does both.

All are measured on the same 256 held-out prompts, which are to be sorted, every five steps: `steps_to` is the first of these
from which two in a row have a mean of `--reward` (0.7), null where none do, and `groups_to` the prompt groups that were admitted
until then, filtered ones among them. Runs are kept in `--folder`: what is there is not made again. The last line is JSON:
{name: {"before": [reward, a seed each], "after": [..], "steps_to": [..], "groups_to": [..], "rested": [turns of rows]}}.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, Cells, rondo, settings
from rondo.launch.report.records import evaluation_records, step_records

EXAMPLE = ROOT / "examples" / "curriculum.py"
_SOURCES = {
    "sort": {"rows": f"{EXAMPLE}:to_sort", "weight": 0.8},
    "others": {"rows": f"{EXAMPLE}:others", "weight": 0.2},
}
_ALONE, _DYNAMIC = {"data.curriculum": None}, {"rollout.filter": "zero_std"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": _ALONE,
    "curriculum": {},
    "mixture": {"data": {"sources": _SOURCES, "filter": f"{EXAMPLE}:answered"}},
    "dynamic": _ALONE | _DYNAMIC,
    "dynamic_curriculum": _DYNAMIC,
}
_EVERY = 5


def cell(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Of one run: reward held out, and prompt groups sampled so far, by version; turns of rows that rested."""
    with tempfile.TemporaryDirectory(prefix="rondo-curriculum-") as folder:
        own = {"run_dir": folder, "seed": seed, "num_steps": steps, "evaluation.every": _EVERY}
        rondo("train", str(EXAMPLE), *settings({**VARIANTS[name], **own}))
        metrics = Path(folder) / "curriculum" / "metrics.jsonl"
        records, found = step_records(metrics), evaluation_records(metrics)
    return {
        "held_out": {each["version"]: round(float(each["reward"]), 4) for each in found},
        "sampled": {each["version"]: each["queues"]["admitted"] for each in records if not each["version"] % _EVERY},
        "rested": sum(count for why, count in records[-1]["left_out"].items() if "rests" in why),
    }


def figures_of(found: Mapping[str, Any], reward: float) -> dict[str, Any]:
    """Those of a cell that the last line has."""
    held_out = {int(version): value for version, value in found["held_out"].items()}
    versions = sorted(held_out)
    pairs = itertools.pairwise(versions[1:])
    reached = next((one for one, then in pairs if held_out[one] + held_out[then] >= 2 * reward), None)
    return {
        "before": held_out[0], "after": held_out[versions[-1]], "steps_to": reached,
        "groups_to": None if reached is None else found["sampled"][str(reached)], "rested": found["rested"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--reward", type=float, default=0.7)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_curriculum"), help="where cells are kept")
    options = parser.parse_args()
    cells, figures = Cells(options.folder / "cells.jsonl"), dict[str, Any]()
    for seed in options.seeds:
        for name in options.names:
            of = {"name": name, "seed": seed, "steps": options.steps}
            found = cells.made(of, functools.partial(cell, name, seed, options.steps))
            for key, value in figures_of(found, options.reward).items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
    print(json.dumps(figures | {"reward": options.reward, "steps": options.steps}))


if __name__ == "__main__":
    main()
