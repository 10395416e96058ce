"""What a teacher saves: steps of the quick start's task to equal reward, with rewards alone, with a teacher alone, and with both.

    rondo bench distill [--seeds 0 1 2] [--steps 100] [--reward 0.8] [--quick]

Each run begins with the quick start's warm-up, and has its data, lengths and learning rate: `grpo` is `examples/quickstart.py`,
`teacher` is `examples/on_policy_distillation.py`, whose teacher alone trains it; `both` adds the rewards, `likeliest` compares
the teacher's 8 likeliest tokens by JSD. Runs are made one after the other, seed by seed. `steps_to` is the first step from which
five steps have a mean reward of `--reward`; null where none does. The last line is JSON: {name: {"before": [reward of the
held-out prompts, a seed each], "after": [..], "steps_to": [..], "step_s": [median seconds a step]}}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.launch.report.records import step_records

ROOT = Path(__file__).resolve().parent.parent
_LIKELIEST = ("form=loss", "support=teacher", "top_k=8", "divergence=jsd")
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("quickstart", ()),
    "teacher": ("on_policy_distillation", ()),
    "both": ("on_policy_distillation", ("distillation.task_coef=1.0",)),
    "likeliest": ("on_policy_distillation", tuple(f"distillation.{each}" for each in _LIKELIEST)),
}
_WINDOW = 5
_RUN_LIMIT_S = 3600.0


def run(example: str, sets: Sequence[str], folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    command = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples" / f"{example}.py")]
    command += [part for setting in (*sets, f"run_dir={folder}") for part in ("--set", setting)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(
            f"the run must end with exit code 0, got {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    records = step_records(folder / example / "metrics.jsonl")
    summary = json.loads((folder / example / "summary.json").read_text())
    return {
        "rewards": [record["reward_mean"] for record in records],
        "step_s": statistics.median(record["step_s"] for record in records),
        "before": summary["reward_before"], "after": summary["reward_after"],
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
    options = parser.parse_args()
    names = ("grpo", "teacher") if options.quick else tuple(VARIANTS)
    figures: dict[str, dict[str, list[Any]]] = {}
    for seed in options.seeds[:1] if options.quick else options.seeds:
        for name in names:
            example, sets = VARIANTS[name]
            with tempfile.TemporaryDirectory(prefix="rondo-distill-") as folder:
                found = run(example, (*sets, f"seed={seed}", f"num_steps={options.steps}"), Path(folder))
            found["steps_to"] = steps_to(found.pop("rewards"), options.reward)
            for key, value in found.items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
            print(f"seed {seed} {name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
