"""GSM8K's whole problems on a small pretrained model, by the hub's rewards: what it learns in a few steps, form and answer apart.

    rondo bench gsm8k --model SmolLM2-135M-Instruct.Q4_1.gguf --data gsm8k/train.jsonl [--steps 12] [--seed 0]

`gsm8k_task.py` is the run: questions of at most 170 characters through the chat template, GRPO, 4 prompts of 8 samples a step,
80 tokens an answer. `right` is `gsm8k` (the last number of the answer is the label's), `form` is `format` (it ends with a line
of #### and a number) and counts a fifth. A model of 135 M parameters solves few of these, and learns how to answer long before
it learns to solve more: the figures show both. The last line is JSON: reward, right, form and cut off by step, held-out reward
before and after, and the median seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, run

CONFIG = ROOT / "benchmarks" / "gsm8k_task.py"
NAMES = {"reward": "reward_mean", "right": "component_right", "form": "component_form", "cut_off": "truncated_fraction"}


def figures(records: list[dict[str, Any]], held_out: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {name: [round(record[metric], 4) for record in records] for name, metric in NAMES.items()}
    step_s = round(statistics.median(record["step_s"] for record in records[1:]), 2)
    return found | {"before": held_out[0], "after": held_out[-1], "step_s": step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a GGUF file")
    parser.add_argument("--data", required=True, help="GSM8K as JSON Lines")
    parser.add_argument("--steps", type=int, default=12, help="2 or more")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    values = {
        "model.path": Path(options.model).resolve(), "data.path": Path(options.data).resolve(), "num_steps": options.steps,
        "seed": options.seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rondo-gsm8k-") as folder:
        found = figures(*run(CONFIG, Path(folder), values))
    for step in range(len(found["reward"])):
        print(f"step {step:3}  " + "  ".join(f"{name} {found[name][step]:.3f}" for name in NAMES))
    print(json.dumps(found | {"steps": options.steps, "seed": options.seed}))


if __name__ == "__main__":
    main()
