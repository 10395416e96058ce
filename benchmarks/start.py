"""Start: where the time goes from the command to the first trained step of the quick start.

    rondo bench start [--repetitions 3] [--warm-up 120]

Prints, for each repetition, the seconds from the command on at which the run had passed its checks, all processes of all roles
were there, the warm-up had made its first step and its last, and a step was trained; then one JSON line with the
medians. `cpu` is the processor time of all that was done.
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
from pathlib import Path

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"
NUM_STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=120, metavar="STEPS")
    options = parser.parse_args()
    found = []
    for number in range(options.repetitions):
        found.append(start(options.warm_up))
        if number == 0:
            print("  ".join(f"{name:>10}" for name in found[0]))
        print("  ".join(f"{seconds:>10.2f}" for seconds in found[-1].values()), flush=True)
    medians = {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}
    print(json.dumps(medians | {"repetitions": len(found)}))


def start(warm_up: int) -> dict[str, float]:
    """Seconds from the command to each point of one run, and its processor seconds."""
    with tempfile.TemporaryDirectory(prefix="rondo-start-") as folder:
        changes = {"run_dir": folder, "num_steps": NUM_STEPS, "sft.steps": warm_up, "sft.warmup_steps": warm_up // 6}
        sets = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "rondo.launch.cli", "train", str(QUICKSTART), "--plain", *sets]
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = Path(folder) / "quickstart"
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    warmed = [event["time"] for event in events if event["kind"] == "sft"]
    at = {
        "checked": next(event["time"] for event in events if event["kind"] == "started"),
        "all there": max(event["time"] for event in events if event["kind"] == "registered"),
        "warms up": warmed[0],
        "warmed up": warmed[-1],
        "first step": next(step["time"] for step in steps if step.get("step") == 0),
    }
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {name: seconds - begun for name, seconds in at.items()} | {"cpu": cpu_s}


if __name__ == "__main__":
    main()
