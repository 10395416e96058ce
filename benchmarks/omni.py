"""Does every modality learn? Short runs of the digit examples on image, audio, video and both at once, warm-up included.

    rondo bench omni                                    # generated digits, one seed each
    rondo bench omni --digits PATH/TO/data --seeds 0 1  # real ones

Each run is the real command with its processes. Rewards are of sampled answers to 256 held-out questions whose pictures and
sounds no training row has: before, under the warmed-up policy, and after. The gap is the largest of any step: mean absolute
difference between the log-probs of engine and trainer under the same weights, in nats. A run takes one core for the warm-up and
two after it, so two beside each other fill a machine of two cores.

Prints a line a run, and JSON last: {modality: {reward_before, reward_after, gap_float32}}, means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODALITIES = ("image", "audio", "video", "mixed")
_LIMIT_S = 3600.0


def run(modality: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; its summary."""
    example = "video_digits.py" if modality == "video" else "omni_digits.py"
    name = f"{modality}_{seed}"
    chosen = [f"run_dir={folder}", f"name={name}", f"seed={seed}", *options.set]
    line = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples" / example), "--plain"]
    line += [part for text in chosen for part in ("--set", text)]
    environment = {**os.environ, "MODALITY": "mixed" if modality == "video" else modality, "OMP_NUM_THREADS": "1"}
    if options.digits is not None:
        environment["DIGITS"] = str(options.digits.resolve())
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        done = subprocess.run(
            line, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=_LIMIT_S, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"the run {name} must end with exit code 0, got {done.returncode}. See {log}")
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_bytes())
    print(
        f"{modality:<6} seed {seed}  reward {summary['reward_before']:.3f} -> {summary['reward_after']:.3f}  "
        f"gap {summary['log_prob_gap']['all']:.1e}  {summary['steps']} steps, {summary['wall_s']:.0f} s, "
        f"lost {summary['samples_lost']}, twice {summary['samples_trained_twice']}",
        flush=True,
    )
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description="Short runs of the digit examples on every modality.")
    parser.add_argument("--digits", type=Path, help="folder with mnist/mnist.parquet and fsdd/fsdd.parquet")
    parser.add_argument("--modalities", nargs="+", choices=MODALITIES, default=MODALITIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--beside", type=int, default=2, help="runs at the same time")
    parser.add_argument("--set", action="append", default=[], help="path=value for every run")
    parser.add_argument("--keep", type=Path, help="folder for the run directories; without it they are removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rondo-omni-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [(modality, seed) for seed in options.seeds for modality in options.modalities]
        with ThreadPoolExecutor(options.beside) as beside:
            found = list(beside.map(lambda pair: run(pair[0], pair[1], options, folder), wanted))
    result = {}
    for modality in options.modalities:
        runs = [summary for (made, _), summary in zip(wanted, found, strict=True) if made == modality]
        result[modality] = {
            "reward_before": sum(summary["reward_before"] for summary in runs) / len(runs),
            "reward_after": sum(summary["reward_after"] for summary in runs) / len(runs),
            "gap_float32": max(summary["log_prob_gap"]["all"] for summary in runs),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
