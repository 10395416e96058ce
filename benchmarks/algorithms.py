"""Every algorithm on one task: reward before and after, and steps to 0.8, by mode and staleness, with equal settings and budget.

    rondo bench algorithms docs/algorithms [--names grpo ...] [--modes colocate:0 ...] [--seeds 0 1 2] [--steps 100] [--lr 2e-4]
    rondo bench algorithms docs/algorithms --quick          GRPO, GSPO and PPO, one seed
    rondo bench algorithms docs/algorithms --modes colocate:0 hybrid:1 fully_async:1 --names grpo --seeds 0 1 2 3 4

A cell is `examples/quickstart.py`, which sorts four digits, with an algorithm's name and nothing else of it, no KL, in a mode, at
a staleness ("fully_async:4"), with a seed. The reward function returns components beside its score, for the algorithms that
compare them; the score is the quick start's. Cells are made one after the other, names innermost, so that one stopped early is
even. Writes docs/algorithms.csv, a row a cell; cells that it holds are not made again, so the whole is filled in over days. Then
it draws docs/algorithms.png, and writes the table of what is there into docs/algorithms.md. `before` and `after` are the sampled
reward of 256 held-out prompts; `steps_to` is the first step at which the mean reward of the last ten is 0.8, empty where there is
none.

The last line is JSON: {name: {mode: {"gain": [..], "steps_to": [..]}}}, a number a seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.launch.report.records import evaluation_records, step_records
from rondo.roles.algorithms.algorithm import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.py"
MODES = ("colocate:0", "fully_async:1", "fully_async:4")
QUICK = ("grpo", "gspo", "ppo")
COLUMNS = ("name", "mode", "seed", "lr", "steps", "before", "after", "steps_to", "wall_s")
GOAL = 0.8
GAIN = 0.3
"""What each must gain at staleness 0 and 1."""
_WINDOW = 10
"""Steps whose mean reward is compared with the goal."""
_RUN_LIMIT_S = 3600.0
_BEGIN, _END = "<!-- rondo bench algorithms: begin -->", "<!-- end -->"

Row = dict[str, str]


def sorted_digits(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> dict[str, float]:
    """The quick start's score, and its components: all digits right, and how many of them are in their place."""
    right = float(response == label)
    places = sum(one == other for one, other in zip(response, label, strict=False)) / len(label)
    return {"score": right, "right": right, "places": places}


def settings_of(name: str, mode: str, seed: int, lr: float, steps: int, folder: Path) -> list[str]:
    from rondo.launch import modes

    kind, _, staleness = mode.partition(":")
    critic = {"critic_processes": 1} if kind == "fully_async" else {"critic": True}
    valued = ALGORITHMS[name].get("advantage") == "gae"
    groups = [group.model_dump(mode="json") for group in getattr(modes, kind)(**critic if valued else {})]
    found = {
        "name": "cell", "run_dir": str(folder), "seed": seed, "num_steps": steps, "max_staleness": int(staleness),
        "role_groups": groups, "algorithm": {"name": name}, "train.lr": lr, "reward.function": f"{__file__}:sorted_digits",
        "reward.components": {"right": 1.0, "places": 0.5},
    }  # fmt: skip
    if valued:
        found["critic"] = {"lr": 5 * lr}
    if ALGORITHMS[name].get("needs_dynamic_sampling"):
        found["rollout.filter"] = "zero_std"
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in found.items()]


def run(name: str, mode: str, seed: int, lr: float, steps: int) -> Row:
    """One cell."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rondo-algorithms-") as folder:
        settings = settings_of(name, mode, seed, lr, steps, Path(folder))
        command = [sys.executable, "-m", "rondo.launch.cli", "train", str(QUICKSTART)]
        command += [part for setting in settings for part in ("--set", setting)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(
                f"the run of {name} in {mode} must end with exit code 0, got {done.returncode}:\n"
                f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        metrics = Path(folder) / "cell" / "metrics.jsonl"
        rewards = [record["reward_mean"] for record in step_records(metrics)]
        first, *_, last = evaluation_records(metrics)
    reached = steps_to(rewards)
    figures = {
        "before": f"{first['reward']:.4f}",
        "after": f"{last['reward']:.4f}",
        "wall_s": f"{time.monotonic() - began:.0f}",
    }
    return {"name": name, "mode": mode, "seed": str(seed), "lr": f"{lr:g}", "steps": str(steps), **figures} | {
        "steps_to": "" if reached is None else str(reached)
    }


def steps_to(rewards: Sequence[float]) -> int | None:
    """The steps that it took until the mean of the last ten is the goal."""
    for end in range(_WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[end - _WINDOW : end]) >= GOAL:
            return end
    return None


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(rows: Sequence[Row], path: Path) -> None:
    order = {name: at for at, name in enumerate(ALGORITHMS)}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            sorted(rows, key=lambda row: (order[row["name"]], row["mode"], float(row["lr"]), int(row["seed"])))
        )


def by_cell(rows: Sequence[Row], lr: float) -> dict[str, dict[str, list[Row]]]:
    """Name -> mode -> the rows of its seeds, at one learning rate."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if math.isclose(float(row["lr"]), lr):
            found.setdefault(row["name"], {}).setdefault(row["mode"], []).append(row)
    return found


def gain(row: Row) -> float:
    return float(row["after"]) - float(row["before"])


def summary(rows: Sequence[Row], lr: float) -> dict[str, dict[str, dict[str, list[Any]]]]:
    return {
        name: {
            mode: {
                "gain": [round(gain(row), 4) for row in cells],
                "steps_to": [int(row["steps_to"]) if row["steps_to"] else None for row in cells],
            }
            for mode, cells in modes.items()
        }
        for name, modes in by_cell(rows, lr).items()
    }


def table(rows: Sequence[Row], lr: float) -> list[str]:
    """The page's table: the means over the seeds that were run, and a dash for what was not."""
    cells = by_cell(rows, lr)
    modes = [mode for mode in MODES if any(mode in each for each in cells.values())]
    modes += sorted({mode for each in cells.values() for mode in each} - set(MODES))
    lines = ["| name | " + " | ".join(modes) + " |", "|---|" + "---|" * len(modes)]
    for name in (name for name in ALGORITHMS if name in cells):
        lines.append(f"| {name} | " + " | ".join(_told(cells[name].get(mode, [])) for mode in modes) + " |")
    return lines


def _told(cells: Sequence[Row]) -> str:
    if not cells:
        return "-"
    before, after = (statistics.fmean(float(row[name]) for row in cells) for name in ("before", "after"))
    reached = [int(row["steps_to"]) for row in cells if row["steps_to"]]
    steps = f"{statistics.fmean(reached):.0f} steps" if len(reached) == len(cells) else "not reached"
    seeds = f", {len(cells)} seeds" if len(cells) > 1 else ""
    return f"{before:.2f} to {after:.2f}, {steps}{seeds}"


def write_page(rows: Sequence[Row], lr: float, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    page.write_text("\n".join([head + _BEGIN, *table(rows, lr), _END + tail]), encoding="utf-8")


def draw(rows: Sequence[Row], lr: float, path: Path) -> None:
    """A group of bars an algorithm, one a mode: the mean gain, with a dot a seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = by_cell(rows, lr)
    names = [name for name in ALGORITHMS if name in cells]
    modes = [mode for mode in MODES if any(mode in cells[name] for name in names)]
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / max(1, len(modes))
    for number, mode in enumerate(modes):
        there = [(at, [gain(row) for row in cells[name][mode]]) for at, name in enumerate(names) if mode in cells[name]]
        places = [at + (number - (len(modes) - 1) / 2) * width for at, _ in there]
        axes.bar(places, [statistics.fmean(gains) for _, gains in there], width, label=mode, color=f"C{number}")
        for place, (_, gains) in zip(places, there, strict=True):
            axes.plot([place] * len(gains), gains, ".", color="black", markersize=3)
    axes.axhline(GAIN, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("gain of sampled reward")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every algorithm on the quick start's task.")
    parser.add_argument("out", type=Path, help="path without an ending, of the csv, the picture and the page")
    parser.add_argument("--names", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=list(MODES), metavar="MODE:STALENESS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="equal for all cells of one csv")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--quick", action="store_true", help="GRPO, GSPO and PPO, one seed")
    parser.add_argument("--draw-only", action="store_true", help="make picture and table of the cells that there are")
    options = parser.parse_args()
    names = [name for name in QUICK if name in ALGORITHMS] if options.quick else options.names
    seeds = [0] if options.quick else options.seeds
    path = options.out.with_suffix(".csv")
    rows = read(path)
    held = {(row["name"], row["mode"], int(row["seed"]), float(row["lr"])) for row in rows}
    for seed in seeds if not options.draw_only else []:
        for mode in options.modes:
            for name in names:
                if (name, mode, seed, options.lr) not in held:
                    rows.append(run(name, mode, seed, options.lr, options.steps))
                    write(rows, path)  # after each cell: what was made stays made
                    print(" ".join(f"{column}={value}" for column, value in rows[-1].items()), flush=True)
    if rows:
        draw(rows, options.lr, options.out.with_suffix(".png"))
        page = options.out.with_suffix(".md")
        if page.exists() and _BEGIN in page.read_text(encoding="utf-8"):
            write_page(rows, options.lr, page)
    print(json.dumps(summary(rows, options.lr)))


if __name__ == "__main__":
    main()
