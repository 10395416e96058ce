"""The quick start as a newcomer meets it: where the time goes to the first trained step and to the end, and what it learns.

    rondo bench start [--seeds 0 1 2] [--steps N]

Each seed is one whole run of `rondo train examples/quickstart.py`. Prints for each the seconds from the command on at which the
run had passed its checks, all processes of all roles were there, the warm-up had made its first step and its last, a step was
trained, and the command had ended; the processor time of all that was done; the reward on held-out prompts under the warmed-up
policy and at the end; and what became of the samples. The last line is JSON: medians of the seconds, the rest by seed. With
--steps the runs are cut short, which the seconds to the first step do not depend on.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"
TOLD = ("reward_before", "reward_after", "samples_trained", "samples_lost", "samples_trained_twice")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="the quick start's own unless given")
    options = parser.parse_args()
    times: list[dict[str, float]] = []
    told: list[dict[str, float]] = []
    for number, seed in enumerate(options.seeds):
        found, summary = start(seed, options.steps)
        times.append(found)
        told.append(summary)
        if number == 0:
            print("seed", *(f"{name:>16}" for name in (*found, *summary)))
        print(f"{seed:4}", *(f"{value:>16.3f}" for value in (*found.values(), *summary.values())), flush=True)
    seconds = {name: round(statistics.median(each[name] for each in times), 2) for name in times[0]}
    by_seed = {name: [round(each[name], 3) for each in told] for name in TOLD}
    print(json.dumps({"seconds": seconds, "seeds": options.seeds} | by_seed))


def start(seed: int, num_steps: int | None, changes: Sequence[str] = ()) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds from the command to each point of one run and its processor seconds, what the run's summary tells). `changes`: of
    its settings."""
    with tempfile.TemporaryDirectory(prefix="rondo-start-") as folder:
        given = [f"run_dir={folder}", f"seed={seed}", *([f"num_steps={num_steps}"] if num_steps else []), *changes]
        sets = [part for change in given for part in ("--set", change)]
        command = [sys.executable, "-m", "rondo.launch.cli", "train", str(QUICKSTART), "--plain", *sets]
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        ended, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        run = Path(folder) / "quickstart"
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
    warmed = [event["time"] for event in events if event["kind"] == "sft"]
    at = {
        "checked": next(event["time"] for event in events if event["kind"] == "started"),
        "all there": max(event["time"] for event in events if event["kind"] == "registered"),
        "warms up": warmed[0],
        "warmed up": warmed[-1],
        "first step": next(step["time"] for step in steps if step.get("step") == 0),
        "ended": ended,
    }
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {name: second - begun for name, second in at.items()} | {"cpu": cpu_s}, {
        name: summary[name] for name in TOLD
    }


if __name__ == "__main__":
    main()
