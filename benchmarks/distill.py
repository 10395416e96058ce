"""What a teacher saves: steps of the quick start's task to equal reward, with rewards alone, with a teacher alone, and with both.

    rondo bench distill [--seeds 0 1 2] [--steps 100] [--reward 0.8] [--quick]

Each run begins with the quick start's warm-up, and has its data, lengths and learning rate: `grpo` is `examples/quickstart.py`,
`teacher` is `examples/on_policy_distillation.py`, whose teacher alone trains it; `both` adds the rewards, `likeliest` compares
the teacher's 8 likeliest tokens by JSD. Runs are made one after the other, seed by seed, and kept in `--folder`: what is there is
not made again. `steps_to` is the first step from which five steps have a mean reward of `--reward`; null where none does. The
last line is JSON: {name: {"before": [reward of the held-out prompts, a seed each], "after": [..], "steps_to": [..], "step_s":
[median seconds a step]}}, "reward" and "steps".
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, Cells, run

_LIKELIEST = {"form": "loss", "support": "teacher", "top_k": 8, "divergence": "jsd"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("quickstart", {}),
    "teacher": ("on_policy_distillation", {}),
    "both": ("on_policy_distillation", {"distillation.task_coef": 1.0}),
    "likeliest": ("on_policy_distillation", {f"distillation.{name}": value for name, value in _LIKELIEST.items()}),
}
_WINDOW = 5


def cell(name: str, seed: int, steps: int, reward: float) -> dict[str, Any]:
    """The figures of one run."""
    example, sets = VARIANTS[name]
    with tempfile.TemporaryDirectory(prefix="rondo-distill-") as folder:
        records, held_out = run(
            ROOT / "examples" / f"{example}.py", Path(folder), {**sets, "seed": seed, "num_steps": steps}
        )
    return {
        "before": held_out[0], "after": held_out[-1],
        "steps_to": steps_to([record["reward_mean"] for record in records], reward),
        "step_s": statistics.median(record["step_s"] for record in records),
    }  # fmt: skip


def steps_to(rewards: Sequence[float], reward: float) -> int | None:
    """The first step from which `_WINDOW` steps have that mean."""
    windows = (rewards[at : at + _WINDOW] for at in range(len(rewards) - _WINDOW + 1))
    return next((at for at, window in enumerate(windows) if statistics.mean(window) >= reward), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--reward", type=float, default=0.8)
    parser.add_argument("--quick", action="store_true", help="one seed, rewards alone and a teacher alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_distill"), help="where cells are kept")
    options = parser.parse_args()
    names = ("grpo", "teacher") if options.quick else tuple(VARIANTS)
    cells, figures = Cells(options.folder / "cells.jsonl"), dict[str, Any]()
    for seed in options.seeds[:1] if options.quick else options.seeds:
        for name in names:
            of = {"name": name, "seed": seed, "steps": options.steps, "reward": options.reward}
            found = cells.made(of, functools.partial(cell, name, seed, options.steps, options.reward))
            for key, value in found.items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
    print(json.dumps(figures | {"reward": options.reward, "steps": options.steps}))


if __name__ == "__main__":
    main()
