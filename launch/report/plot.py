"""Plot: reward, staleness and step time of a run as one PNG, from its metrics.jsonl.

Owns the picture. It runs as a process of its own, `python -m rondo.launch.report.plot RUN [OUT.png]`, so that the run and the
CLI never import matplotlib, which comes with the extra `plot`. EXIT_UNDRAWN with one line when it cannot be drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rondo.launch.report.records import evaluation_records, step_records
from rondo.runtime.errors import ConfigError, RondoError

EXIT_UNDRAWN = 2
INSTALL = "pip install 'rondo-rl[plot]'"


def draw(run: Path, out: Path | None = None) -> Path:
    """Draws the curves of a run directory and returns the picture's path, `RUN/curves.png` unless told otherwise."""
    steps, evaluations = step_records(run / "metrics.jsonl"), evaluation_records(run / "metrics.jsonl")
    if not steps:
        raise ConfigError(
            f"RUN must have finished a step, got {run} without any in metrics.jsonl. See `rondo explain {run}`"
        )
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(f"plots need matplotlib, got no such package. Install it: {INSTALL}") from error
    figure = Figure(figsize=(8, 9), layout="constrained")
    reward, staleness, seconds = figure.subplots(3, 1, sharex=True)
    figure.suptitle(run.resolve().name)
    _line(reward, steps, "reward_mean", "training samples")
    for name, points in evaluation_lines(evaluations).items():
        reward.plot([x for x, _ in points], [y for _, y in points], "o--", markersize=4, label=name)
    of_job = "job" in steps[-1]
    if of_job:
        _line(reward, steps, "loss", "training rows")
    reward.set_ylabel("loss" if of_job else "reward")
    _line(staleness, steps, "staleness_mean", "mean")
    _line(staleness, steps, "staleness_max", "max")
    for name, points in measured_lines(evaluations).items():
        axes = reward if name == "eval_loss" else staleness
        axes.plot([x for x, _ in points], [y for _, y in points], "o--", markersize=4, label=name)
    _line(staleness, steps, "rewards/accuracies", "training rows")
    staleness.set_ylabel("accuracy" if of_job else "staleness (policy versions)")
    _line(seconds, steps, "step_s", "step")
    _line(seconds, steps, "train_s", "training")
    _line(seconds, steps, "wait_s", "waiting for data")
    _line(seconds, steps, "longest_wait_s", "waiting for the longest trajectory")
    seconds.set_ylabel("seconds")
    seconds.set_ylim(bottom=0)
    seconds.set_xlabel("step")
    for axes in (reward, staleness, seconds):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    out = out or run / "curves.png"
    figure.savefig(out, dpi=120)
    return out


def evaluation_lines(evaluations: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Label -> (version, value) of what evaluations found: every set's mean, and its pass@k for the greatest k."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for found in evaluations:
        for name, figures in found.get("sets", {}).items():
            passes = [figure for figure in figures if figure.startswith("pass@")]
            for figure in (*(f for f in figures if f.startswith("mean@")), *passes[-1:]):
                if figure != "pass@1":  # the share of solved prompts: the mean, where rewards are 0 and 1
                    lines.setdefault(f"{name} {figure}", []).append((found["version"], figures[figure]))
        if "sets" not in found and found["reward"] is not None:
            lines.setdefault("held-out prompts", []).append((found["version"], found["reward"]))
    return lines


def measured_lines(evaluations: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Figure -> (version, value) of what a job without rollouts measured: its loss, and shares of what is right."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for found in evaluations:
        for name, value in found.get("figures", {}).items():
            if name == "eval_loss" or "accurac" in name:
                lines.setdefault(name, []).append((found["version"], value))
    return lines


def _line(axes: Any, steps: list[dict[str, Any]], name: str, label: str) -> None:
    points = [(record["step"], record[name]) for record in steps if record.get(name) is not None]
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], label=label)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m rondo.launch.report.plot RUN [OUT.png]", file=sys.stderr)
        return EXIT_UNDRAWN
    try:
        print(draw(*(Path(argument) for argument in arguments)))
    except RondoError as error:
        print(error, file=sys.stderr)
        return EXIT_UNDRAWN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
