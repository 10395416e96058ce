"""Do the examples of agents learn? Each as it is shipped: rewards of held-out rows before and after.

    rondo bench examples                                  # all of them, three seeds: an hour and more
    rondo bench examples --names zoom_digits calculator --seeds 0
    rondo bench examples --data PATH/TO/data              # real handwriting and speech in those of digits

A cell is one run of an example, by the command, with one seed. `zoom_digits none` is the example without its tool. Rewards are of
sampled answers, before the first step (behind the warm-up) and after the last. `parts` are means of what rewards consist of, in
both. Cells are kept in `--folder`: what is there is not made again, so a benchmark that was stopped goes on.

Prints a line a cell, and JSON last: {name: {"before": [by seed], "after": [..], "parts": [..], "steps": [..], "wall_s": [..]}}.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, Cells, run

NAMES = (
    "calculator", "memory_agent", "external_agent", "self_play", "text_game", "reasoning_gym_mixture", "zoom_digits",
    "zoom_digits none", "zoom_digits listen", "zoom_digits seek",
)  # fmt: skip
"""Examples, and the value of TOOL in the environment of those that look for it."""


def measured(name: str, seed: int) -> dict[str, Any]:
    example, _, tool = name.partition(" ")
    os.environ["TOOL"] = tool or "zoom"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rondo-examples-") as folder:
        records, held_out = run(ROOT / "examples" / f"{example}.py", Path(folder), {"seed": seed})
        parts = {label: _parts(Path(folder) / "measured" / "samples", label) for label in ("start", "end")}
    return {
        "before": round(held_out[0], 4), "after": round(held_out[-1], 4), "parts": parts, "steps": len(records),
        "wall_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _parts(samples: Path, label: str) -> dict[str, float]:
    """Means of the numbers that rewards of an evaluation consist of."""
    lines = [line for file in samples.glob(f"{label}.*.jsonl") for line in file.read_text().splitlines()]
    details = [json.loads(line)["details"] or {} for line in lines]
    names = [name for name, value in details[0].items() if isinstance(value, float | int)] if details else []
    return {name: round(statistics.fmean(each[name] for each in details), 4) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="folder with mnist/mnist.parquet and fsdd/fsdd.parquet")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_examples"), help="where cells are kept")
    options = parser.parse_args()
    if options.data is not None:
        os.environ["DIGITS"] = str(options.data.resolve())
    digits = "drawn" if options.data is None else "real"
    cells, found = Cells(options.folder / "cells.jsonl"), dict[str, Any]()
    for seed in options.seeds:
        for name in options.names:
            of = {"name": name, "seed": seed} | ({"digits": digits} if "digits" in name else {})
            for key, value in cells.made(of, functools.partial(measured, name, seed)).items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
    print(json.dumps(found | {"digits": digits}))


if __name__ == "__main__":
    main()
