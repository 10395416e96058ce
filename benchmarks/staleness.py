"""What staleness buys and costs: the quick start at max_staleness 0, 1, 2, 4 and 8, reward by step and by wall clock.

    rondo bench staleness docs/staleness [--staleness 0 1 2 4 8] [--seeds 0 1 2] [--steps 150]

Each run is `examples/quickstart.py` with one setting and the seed changed; at staleness 0 the role `actor_fwd` is left out,
since the trainer's own log-probs are the old ones. Runs are made one after the other, seed by seed. Writes docs/staleness.csv,
a row a step, and docs/staleness.png; runs that the csv already holds are not made again, so a figure can be filled in over
days. `wall_s` counts from the beginning of the first step: loading and warm-up, which are equal for all, are left out. The last
line is JSON: per staleness, steps a second and the mean reward of the last tenth of the steps, over the seeds there are.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rondo.launch.report.records import step_records

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.py"
COLUMNS = ("max_staleness", "seed", "step", "wall_s", "step_s", "reward_mean", "staleness_mean", "staleness_max")
_WINDOW = 10
"""Steps that a curve's points are the mean of."""
_RUN_LIMIT_S = 3600.0

Row = dict[str, float]
Rows = list[Row]


def run(staleness: int, seed: int, num_steps: int, sets: Sequence[str], folder: Path) -> Rows:
    """One quick start, as rows of the csv."""
    settings = [f"max_staleness={staleness}", f"seed={seed}", f"num_steps={num_steps}", f"run_dir={folder}", *sets]
    if staleness == 0:
        settings.append(f"role_groups={json.dumps(_without_actor_fwd())}")
    command = [sys.executable, "-m", "rondo.launch.cli", "train", str(QUICKSTART)]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(
            f"the run must end with exit code 0, got {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    rows, wall_s = [], 0.0
    for record in step_records(folder / "quickstart" / "metrics.jsonl"):
        wall_s += record["step_s"]
        figures = {name: record[name] for name in COLUMNS if name in record}
        rows.append({"max_staleness": staleness, "seed": seed, "wall_s": wall_s, **figures})
    return rows


def _without_actor_fwd() -> list[dict[str, object]]:
    from rondo.launch.modes import fully_async

    return [group.model_dump(mode="json") for group in fully_async(reference_replicas=1)]


def read(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def write(rows: Rows, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows, key=lambda row: (row["max_staleness"], row["seed"], row["step"])):
            writer.writerow([f"{row[name]:.6g}" for name in COLUMNS])


def curves(rows: Rows) -> dict[int, list[Rows]]:
    """Staleness -> the runs of its seeds, each in order of steps."""
    found: dict[int, dict[float, Rows]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        found.setdefault(int(row["max_staleness"]), {}).setdefault(row["seed"], []).append(row)
    return {staleness: list(found[staleness].values()) for staleness in sorted(found)}


def summary(rows: Rows) -> dict[str, dict[str, float]]:
    """What the last line says, by staleness."""
    found = {}
    for staleness, runs in curves(rows).items():
        last = [statistics.fmean(row["reward_mean"] for row in run[-max(1, len(run) // 10) :]) for run in runs]
        found[str(staleness)] = {
            "seeds": len(runs),
            "steps_per_s": round(statistics.fmean(len(run) / run[-1]["wall_s"] for run in runs), 3),
            "reward": round(statistics.fmean(last), 4),
            "staleness_mean": round(statistics.fmean(row["staleness_mean"] for run in runs for row in run), 3),
        }
    return found


def draw(rows: Rows, path: Path) -> None:
    """Reward by step, by wall clock, and steps a second: a line a staleness, the mean of its seeds, which are faint lines."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (by_step, by_clock, speed) = pyplot.subplots(
        1, 3, figsize=(13, 4), layout="constrained", width_ratios=(2, 2, 1)
    )
    figures = summary(rows)
    for number, (staleness, runs) in enumerate(curves(rows).items()):
        smooth = [_smoothed(run) for run in runs]
        colour = f"C{number}"
        for points in smooth if len(smooth) > 1 else []:
            by_step.plot(
                [p["step"] for p in points], [p["reward_mean"] for p in points], colour, alpha=0.25, linewidth=0.8
            )
            by_clock.plot(
                [p["wall_s"] for p in points], [p["reward_mean"] for p in points], colour, alpha=0.25, linewidth=0.8
            )
        mean = [
            {name: statistics.fmean(p[name] for p in at) for name in ("step", "wall_s", "reward_mean")}
            for at in zip(*smooth, strict=False)
        ]
        label = f"{staleness} ({len(runs)} {'seed' if len(runs) == 1 else 'seeds'})"
        by_step.plot([p["step"] for p in mean], [p["reward_mean"] for p in mean], colour, label=label)
        by_clock.plot([p["wall_s"] for p in mean], [p["reward_mean"] for p in mean], colour, label=label)
        speed.bar(str(staleness), figures[str(staleness)]["steps_per_s"], color=colour)
    by_step.set_xlabel("step")
    by_step.set_ylabel(f"reward of training samples (mean of {_WINDOW} steps)")
    by_step.legend(title="max_staleness")
    by_clock.set_xlabel("seconds since the first step began")
    speed.set_xlabel("max_staleness")
    speed.set_ylabel("steps a second")
    for axes in (by_step, by_clock, speed):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smoothed(run: Rows) -> Rows:
    names = ("step", "wall_s", "reward_mean")
    parts = [run[start : start + _WINDOW] for start in range(0, len(run), _WINDOW)]
    return [{name: statistics.fmean(row[name] for row in part) for name in names} for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description="The quick start at several bounds of staleness.")
    parser.add_argument("out", type=Path, help="path without an ending, of the csv and the picture")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150, help="equal for all runs of one csv")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="further settings of the quick start"
    )
    parser.add_argument("--draw-only", action="store_true", help="make the picture of the runs that there are")
    options = parser.parse_args()
    table, picture = options.out.with_suffix(".csv"), options.out.with_suffix(".png")
    rows = read(table)
    held = {(row["max_staleness"], row["seed"]) for row in rows}
    for seed in options.seeds if not options.draw_only else []:
        for staleness in options.staleness:
            if (staleness, seed) in held:
                continue
            with tempfile.TemporaryDirectory(prefix="rondo-staleness-") as folder:
                rows += run(staleness, seed, options.steps, options.set, Path(folder))
            write(rows, table)  # after each run: what was made stays made
            figures = summary([row for row in rows if row["max_staleness"] == staleness])
            print(f"max_staleness {staleness}, seed {seed}: {figures[str(staleness)]}", flush=True)
    if rows:
        draw(rows, picture)
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
