"""The course of a long run as a table and a picture: what docs/media.md shows of its 2,000 steps of video.

    rondo bench curve runs/video_digits docs/video_digits

Writes docs/video_digits.csv (a row every so many steps, means over them) and docs/video_digits.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.launch.report.records import evaluation_records, step_records

COLUMNS = ("reward_mean", "log_prob_gap", "log_prob_gap_max", "entropy", "grad_norm", "step_s")


def mean_of(records: Sequence[dict[str, Any]], name: str) -> float:
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description="CSV and PNG of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="path without an ending")
    parser.add_argument("--every", type=int, default=20, help="steps of a row")
    options = parser.parse_args()
    steps = step_records(options.run / "metrics.jsonl")
    parts = [steps[start : start + options.every] for start in range(0, len(steps), options.every)]
    rows = [[part[-1]["step"] + 1, *(mean_of(part, name) for name in COLUMNS)] for part in parts]
    with options.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *COLUMNS])
        writer.writerows([row[0], *(f"{value:.6g}" for value in row[1:])] for row in rows)
    draw(rows, evaluation_records(options.run / "metrics.jsonl"), options.out.with_suffix(".png"))
    print(f"{len(steps)} steps, {options.out}.csv and {options.out}.png")


def draw(rows: Sequence[Sequence[float]], evaluations: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (reward, gap) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    at = [row[0] for row in rows]
    reward.plot(at, [row[1] for row in rows], label="training samples")
    held_out = [(e["version"], e["reward"]) for e in evaluations]
    reward.plot(*zip(*held_out, strict=True), "o", label="held-out questions")
    reward.set_ylim(0, 1)
    reward.set_ylabel("mean reward")
    reward.legend()
    gap.semilogy(at, [row[2] for row in rows], label="mean absolute")
    gap.semilogy(at, [row[3] for row in rows], label="greatest")
    gap.set_ylabel("log-prob gap (nats)")
    gap.set_xlabel("step")
    gap.legend()
    for axes in (reward, gap):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
