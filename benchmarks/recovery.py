"""Recovery: SIGKILL of each role once in one run of the quick start; how soon it is seen and made good.

    rondo bench recovery [--steps 60]

For each role: seconds from the kill to the supervisor seeing it, and to the role being ready again (imports included); then what
was lost and trained twice, from the journal. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROLES = ("rollout", "actor_fwd", "reference", "advantages", "actor", "coordinator")
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="rondo-recovery-") as folder:
        kills = [part for i, role in enumerate(ROLES) for part in ("--kill", f"{role}@{(i + 1) * steps // 8}")]
        sets = ["--set", f"num_steps={steps}", "--set", f"run_dir={folder}"]
        command = [sys.executable, "-m", "rondo.launch.cli", "train", str(QUICKSTART), "--plain", *sets, *kills]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder) / "quickstart"
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
    result: dict[str, object] = {}
    print(f"{'role':<14}{'seen after s':>14}{'ready after s':>15}")
    for role in ROLES:
        killed = next(e for e in events if e["kind"] == "killed_on_purpose" and e["group"].startswith(role))
        name, at = killed["group"], killed["time"]
        died = next(e for e in events if e["kind"] == "died" and e["group"] == name)["time"] - at
        ready = next(e for e in events if e["kind"] == "ready" and e["group"] == name and e["time"] > at)["time"] - at
        result[role] = {"seen_s": round(died, 3), "ready_s": round(ready, 2)}
        print(f"{role:<14}{died:>14.3f}{ready:>15.2f}")
    names = ("samples_admitted", "samples_trained", "samples_lost", "samples_trained_twice", "restarts", "wall_s")
    result |= {name: summary[name] for name in names}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
