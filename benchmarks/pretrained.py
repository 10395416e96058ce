"""A pretrained model by algorithm: GRPO, GSPO, RLOO, and distillation from the copy of it that GRPO trained, by step.

    rondo bench pretrained --model SmolLM2-135M-Instruct.Q4_1.gguf [--steps 20] [--seeds 0] [--names grpo gspo rloo distillation]

Every run is `examples/pretrained_sums.py` (sums of two numbers through the chat template, hybrid, one version stale) with another
algorithm and nothing else of it, from the same weights. `distillation` has no reward: its teacher is the last version of the
first seed's `grpo`. Cells are made one after the other, and kept in `--folder` with the teacher: what is there is not made again.
The last line is JSON: {name: {"before": [reward of the held-out prompts, a seed each], "after": [..], "rewards": [[mean reward of
each step]], "teacher_kl": [[of each step]], "step_s": [median seconds a step]}}, and "steps".
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, Cells, run

CONFIG = ROOT / "examples" / "pretrained_sums.py"
NAMES = ("grpo", "gspo", "rloo", "distillation")


def settings_of(name: str, seed: int, steps: int, model: str, teacher: Path) -> dict[str, Any]:
    from rondo.launch.modes import hybrid

    found: dict[str, Any] = {"model.path": model, "seed": seed, "num_steps": steps}
    if name != "distillation":
        return found | {"algorithm": json.dumps({"name": name})}
    groups = [group.model_dump(mode="json") for group in hybrid(threads=2, teacher=True)]
    taught = {"teacher": {"model": {"path": str(teacher)}}, "task_coef": 0.0}
    return found | {"role_groups": json.dumps(groups), "distillation": json.dumps(taught)}


def cell(name: str, seed: int, steps: int, model: str, teacher: Path) -> dict[str, Any]:
    """The figures of one run; that of `grpo` leaves its last version as the teacher, where there is none yet."""
    with tempfile.TemporaryDirectory(prefix="rondo-pretrained-") as made:
        records, held_out = run(CONFIG, Path(made), settings_of(name, seed, steps, model, teacher))
        if name == "grpo" and not teacher.exists():
            [last] = Path(made).glob(f"measured/checkpoints/step_{steps:06d}/hf")
            shutil.copytree(last, part := teacher.with_suffix(".part"), dirs_exist_ok=True)
            part.rename(teacher)
    return {
        "before": held_out[0], "after": held_out[-1],
        "rewards": [round(record["reward_mean"], 4) for record in records],
        "teacher_kl": [round(record["teacher_kl"], 4) for record in records if "teacher_kl" in record],
        "step_s": round(statistics.median(record["step_s"] for record in records[1:]), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a GGUF file")
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=20, help="2 or more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_pretrained"), help="of cells and the teacher")
    options = parser.parse_args()
    from rondo.models.config import ModelConfig
    from rondo.models.load import prepare

    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = prepare(ModelConfig(path=str(Path(options.model).resolve())), folder / "model")
    cells, teacher = Cells(folder / "cells.jsonl"), folder / f"teacher_{options.steps}"
    found: dict[str, Any] = {name: {} for name in options.names}
    for seed in options.seeds:
        for name in sorted(options.names, key=NAMES.index):
            of = {"name": name, "seed": seed, "steps": options.steps, "model": Path(options.model).name}
            if name == "distillation" and not teacher.exists():
                cell("grpo", options.seeds[0], options.steps, model, teacher)
            figures = cells.made(of, functools.partial(cell, name, seed, options.steps, model, teacher))
            for key, value in figures.items():
                found[name].setdefault(key, []).append(value)
    print(json.dumps(found | {"steps": options.steps}))


if __name__ == "__main__":
    main()
