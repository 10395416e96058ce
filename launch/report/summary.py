"""Summary: a finished run in one page, the same as `summary.json` and as the table at the end.

Owns what goes into the summary and how it is shown. Does not count samples (`comm/bus/audit.py` reads the journal) and does
not judge: every figure is read from the run's files or from the supervisor's outcome.

    metrics.jsonl, journal/  ->  summarize  ->  Summary  ->  summary.json, and a table
"""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondo.launch.report.records import (
    evaluation_figures,
    evaluation_records,
    is_step,
    read_metrics,
    read_records,
    shown_reward,
    step_records,
)
from rondo.launch.rundir import ENVIRONMENT, changed_settings, read_json, write_json
from rondo.models.media.inputs import KINDS
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.telling import telling

if TYPE_CHECKING:
    from rich.console import Console


_NUM_CAUSES = 5
_REWARD_OF = re.compile(r"^.*?\breward of .*?, sample \d+: ")
_SHOWN_WAIT_S = 0.05
"""Waits that add up to less are left out of the table; summary.json has them."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Samples, not prompt groups; seconds and bytes; None where it was not measured."""

    name: str
    exit_code: int
    attempt: int
    steps: int
    wall_s: float
    reward_before: float | None = None
    """Mean reward of sampled answers to held-out prompts under the first policy version that was evaluated; None where the reward
    of all of them failed."""
    reward_after: float | None = None
    """The same under the last one; None when only one version was evaluated."""
    failed_rewards: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of the rewards "before", "after" and "trained": how many samples, and how many of them have none because it failed. Those
    without a failure are left out."""
    evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Policy version -> mean@k and pass@k of each evaluated set."""
    samples_admitted: int | None = None
    samples_trained: int | None = None
    samples_lost: int | None = None
    samples_trained_twice: int | None = None
    samples_by_outcome: Mapping[str, int] = field(default_factory=dict)
    """Samples whose prompt groups ended in another way than by being trained."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Why prompt groups were quarantined, and how many for each cause; the most frequent ones."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """The same of those that failed, too few of whose samples have a reward."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rows that the run went on without: prompts that are too long, demonstrations that could not be used, and turns of rows
    that a filter left out or that rested, by reason."""
    log_prob_gap: Mapping[str, float] = field(default_factory=dict)
    """Mean absolute gap between the log-probs of engine and trainer under the same weights, in nats, the largest of any
    step: of all tokens, and of rows with each modality."""
    modalities: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Kind of rows, where some have media -> samples trained, and means over samples: their reward in the first tenth of the
    steps and in the last, and in that the tokens of a response and the part of them that was clipped."""
    explained_variance: Mapping[str, float] = field(default_factory=dict)
    """Of the critic's values, in the "first" tenth of its steps and in the "last"; the mean over these."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    recovery_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds from a death to a role group that is ready again; the slowest of each role."""
    first_step_s: float | None = None
    """Seconds from the start of the run to its first committed step."""
    longest_wait_s: float | None = None
    """Seconds from when half of a step's prompt groups were there, and the version it trains on, to when the last was: what
    its longest trajectories cost; the mean over steps."""
    staleness_tokens: Mapping[str, int] = field(default_factory=dict)
    """Policy versions between a token's step and its own version -> tokens trained."""
    staleness_histogram: Mapping[str, int] = field(default_factory=dict)
    """Samples trained at each staleness, in policy versions."""
    waits_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Resident memory of each process, the most that was seen."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """Cores that each process kept busy, on average over the run."""
    cpu_share: float | None = None
    """Processor time of all processes over wall time times cores, 0 to 1."""
    first_cause: str | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    """Settings that a resume changed: "train.lr (step 40)" -> "0.001 -> 0.0005"."""
    untold: Mapping[str, int] = field(default_factory=dict)
    """What could not be written down or shown while the run went on, and how often."""


def summarize(
    run: Path,
    *,
    exit_code: int,
    wall_s: float,
    attempt: int = 0,
    started: float | None = None,
    **outcome: Any,
) -> Summary:
    """Reads a run directory. What the files do not hold comes from the supervisor's outcome, under the names that it has here;
    `started` is the wall-clock time of its start, in seconds since the epoch."""
    metrics = run / "metrics.jsonl"
    steps, evaluations = step_records(metrics), evaluation_records(metrics)
    since = started if started is not None else 0.0  # a resumed run has steps from before
    told = (r["time"] for r in read_records(metrics) if is_step(r))
    first_time = next((at for at in told if at >= since), None)
    waits = [record["longest_wait_s"] for record in steps if "longest_wait_s" in record]
    counts: dict[str, Any] = {}
    with telling("the audit"):
        counts = _audit(run)
    return Summary(
        name=run.resolve().name,
        exit_code=exit_code,
        attempt=attempt,
        steps=steps[-1]["step"] + 1 if steps else 0,
        wall_s=wall_s,
        reward_before=evaluations[0]["reward"] if evaluations else None,
        reward_after=evaluations[-1]["reward"] if len(evaluations) > 1 else None,
        evaluations={str(found["version"]): evaluation_figures(found) for found in evaluations},
        **counts,
        quarantined=causes(run / "events.jsonl", "quarantined"),
        failed=causes(run / "events.jsonl", "failed"),
        failed_rewards=failed_rewards(steps, evaluations),
        left_out=left_out(run / "events.jsonl", steps),
        log_prob_gap=largest_gaps(steps),
        modalities=by_modality(steps),
        explained_variance=explained_variance(read_metrics(metrics)),
        first_step_s=first_time - started if first_time is not None and started is not None else None,
        longest_wait_s=sum(waits) / len(waits) if waits else None,
        staleness_tokens=dict(
            sum((collections.Counter(r.get("staleness_tokens", {})) for r in steps), collections.Counter())
        ),
        waits_s=waits_by_role(read_records(metrics)),
        changes=changes(run),
        **outcome,
    )


def changes(run: Path) -> dict[str, str]:
    """As in `Summary`."""
    with suppress(ConfigError):  # a run that ended before it had one
        return changed_settings(read_json(run / ENVIRONMENT))
    return {}


def failed_rewards(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[int, int]]:
    """As in `Summary`."""
    parts = {"before": evaluations[:1], "after": evaluations[1:][-1:], "trained": steps}
    found = {
        name: (sum(r.get("num_samples", 0) for r in records), sum(r.get("num_failed", 0) for r in records))
        for name, records in parts.items()
    }
    return {name: counts for name, counts in found.items() if counts[1]}


def causes(events: Path, state: str) -> dict[str, int]:
    """Cause -> prompt groups that ended in this state, most frequent first. A cause is told without the row's name, so that equal
    ones add up."""
    last: dict[tuple[str, str], str] = {}
    for record in read_records(events):
        if record.get("kind") == "group_error" and record.get("state") == state:
            last[str(record.get("source")), str(record.get("group"))] = _cause(str(record.get("why")))
    return dict(collections.Counter(last.values()).most_common(_NUM_CAUSES))


def left_out(events: Path, steps: Sequence[Mapping[str, Any]] = ()) -> dict[str, int]:
    """As in `Summary`; a row counts once, however often it came."""
    prompts, num_demonstrations = (
        set(),
        max((record.get("skipped", 0) for record in steps if "job" in record), default=0),
    )
    for record in read_records(events):
        if record.get("kind") == "left_out":
            prompts.add(str(record.get("why")))
        elif record.get("kind") == "sft":
            num_demonstrations = record.get("skipped", 0)
    turns: Mapping[str, int] = next((record["left_out"] for record in reversed(steps) if "left_out" in record), {})
    found = {"prompts": len(prompts), "demonstrations": num_demonstrations, **turns}
    return {name: count for name, count in found.items() if count}


def _cause(why: str) -> str:
    """A traceback's last line, or one line without the row's name before it."""
    why, num = _REWARD_OF.subn("", why, count=1)
    lines = why.splitlines()
    return lines[-1] if len(lines) > 1 else why if num else why.partition(": ")[2] or why


def largest_gaps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name without "log_prob_gap" ("all", "image", ...) -> the largest mean absolute gap of any step."""
    found: dict[str, float] = {}
    for record in steps:
        for name, value in record.items():
            kind = name.removeprefix("log_prob_gap").removeprefix("_") or "all"
            if name.startswith("log_prob_gap") and (kind == "all" or kind in KINDS):
                found[kind] = max(found.get(kind, 0.0), value or 0.0)
    return found


def by_modality(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """As in `Summary`."""
    tenth = -(-len(steps) // 10)
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        wanted = (
            ("reward_first", "reward_mean", steps[:tenth]), ("reward_last", "reward_mean", steps[-tenth:]),
            ("response_tokens", "response_tokens", steps[-tenth:]), ("clip_fraction", "clip_fraction", steps[-tenth:]),
        )  # fmt: skip
        for figure, name, among in wanted:
            told = [
                (r[f"{name}_{kind}"], r[f"num_samples_{kind}"]) for r in among if r.get(f"{name}_{kind}") is not None
            ]
            if told:
                mean = sum(value * num for value, num in told) / sum(num for _, num in told)
                found.setdefault(kind, {"num_samples": sum(r.get(f"num_samples_{kind}", 0) for r in steps)})[figure] = (
                    mean
                )
    return found


def explained_variance(records: Iterator[Mapping[str, Any]]) -> dict[str, float]:
    """As in `Summary`."""
    steps = {record["critic"]["step"]: record["critic"] for record in records if "critic" in record}
    told = [found for step in sorted(steps) if (found := steps[step].get("explained_variance")) is not None]
    tenth = -(-len(told) // 10)
    return {"first": statistics.fmean(told[:tenth]), "last": statistics.fmean(told[-tenth:])} if told else {}


def waits_by_role(records: Iterator[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds waited, by role and wait. A record's "waits_s" counts up from its process's start; a figure below the one
    before it is a new process, and what the old one had waited stays counted."""
    finished: dict[tuple[str, str], float] = {}
    running: dict[tuple[str, str], float] = {}
    for record in records:
        for name, seconds in record.get("waits_s", {}).items():
            key = (record.get("source", "-"), name)
            if seconds < running.get(key, 0.0):
                finished[key] = finished.get(key, 0.0) + running[key]
            running[key] = seconds
    roles: dict[str, dict[str, float]] = {}
    for (source, name), seconds in running.items():
        waits = roles.setdefault(source.partition("-")[0], {})
        waits[name] = waits.get(name, 0.0) + seconds + finished.get((source, name), 0.0)
    return roles


def write(run: Path, summary: Summary) -> Path:
    """Writes summary.json and returns its path."""
    path = run / "summary.json"
    write_json(path, asdict(summary))
    return path


def read(run: Path) -> Summary | None:
    """The summary of a finished run; None when there is none yet, a power loss tore it, or it lacks fields."""
    known = {item.name for item in fields(Summary)}
    try:
        tree = read_json(run / "summary.json")
        return Summary(**{name: value for name, value in tree.items() if name in known})
    except (ConfigError, TypeError):
        return None


def print_table(summary: Summary, console: Console | None = None) -> None:
    """Prints the summary: a table on a terminal, `name  value` lines elsewhere."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    if not console.is_terminal:
        for name, value in rows(summary):  # a Console would end the process where nobody reads
            print(f"{name:<24}{value}", file=console.file, flush=True)
        return
    table = Table(title=f"run {summary.name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows(summary):
        table.add_row(name, value)
    console.print(table, highlight=False)


def rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """The summary as pairs of text, in order of interest. What was not measured is left out."""
    for name, reward in (("before", summary.reward_before), ("after", summary.reward_after)):
        of, failed = summary.failed_rewards.get(name, (0, 0))
        if failed or reward is not None:
            yield f"reward_{name}", shown_reward(reward, {"num_samples": of, "num_failed": failed})
    if "trained" in summary.failed_rewards:
        yield "failed_rewards", "of {}, {} failed".format(*summary.failed_rewards["trained"])
    for version, figures in summary.evaluations.items():
        if len(figures) > 1:  # a lone mean is the reward above
            yield f"evaluation.{version}", "  ".join(f"{name}={value:.3f}" for name, value in figures.items())
    yield "steps", str(summary.steps)
    for name, change in summary.changes.items():
        yield "changed", f"{name}: {change}"
    for name in ("samples_admitted", "samples_trained", "samples_lost", "samples_trained_twice"):
        value = getattr(summary, name)
        if value is not None:
            yield name, str(value)
    if summary.samples_by_outcome:
        yield "samples_by_outcome", _pairs(summary.samples_by_outcome)
    for cause, count in summary.quarantined.items():
        yield "quarantined", f"{count} x {cause}"
    for cause, count in summary.failed.items():
        yield "failed", f"{count} x {cause}"
    if summary.left_out:
        yield "left_out", _pairs(summary.left_out)
    for kind, figures in summary.modalities.items():
        yield f"rows: {kind}", " ".join(f"{name}={value:.4g}" for name, value in figures.items())
    if summary.log_prob_gap:
        yield "log_prob_gap", " ".join(f"{name}={value:.2g}" for name, value in summary.log_prob_gap.items())
    if summary.explained_variance:
        values = summary.explained_variance.items()
        yield "explained_variance", " ".join(f"{name}={value:.3f}" for name, value in values)
    yield "restarts", _pairs(summary.restarts) or "0"
    if summary.recovery_s:
        yield "recovery_s", _pairs(summary.recovery_s)
    yield "wall_s", f"{summary.wall_s:.1f}"
    if summary.first_step_s is not None:
        yield "first_step_s", f"{summary.first_step_s:.1f}"
    if summary.staleness_histogram:
        yield "staleness_histogram", _pairs(summary.staleness_histogram)
    if len(summary.staleness_tokens) > 1:
        yield "staleness_tokens", _pairs(summary.staleness_tokens)
    if summary.longest_wait_s is not None:
        yield "longest_wait_s", f"{summary.longest_wait_s:.3f}"
    for role, waits in sorted(summary.waits_s.items()):
        longest = sorted(waits.items(), key=lambda item: -item[1])
        yield f"waits_s.{role}", _pairs({name: seconds for name, seconds in longest if seconds >= _SHOWN_WAIT_S}) or "0"
    if summary.memory_bytes:
        yield "memory_bytes", " ".join(f"{name}={value / 2**20:.0f}MiB" for name, value in summary.memory_bytes.items())
    if summary.cores:
        yield "cores", " ".join(f"{name}={value:.3f}" for name, value in summary.cores.items())
    if summary.cpu_share is not None:
        yield "cpu_share", f"{summary.cpu_share:.2f}"
    if summary.untold:
        yield "untold", " ".join(f"{name}={count}" for name, count in summary.untold.items())
    if summary.attempt:
        yield "attempt", str(summary.attempt)
    yield "exit_code", str(summary.exit_code)
    if summary.first_cause:
        yield "first_cause", summary.first_cause


def _pairs(values: Mapping[str, float]) -> str:
    return " ".join(
        f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


def _audit(run: Path) -> dict[str, Any]:
    """Counts of samples from the journal; empty for a run that ended before its coordinator wrote one."""
    from rondo.comm.bus.audit import audit
    from rondo.comm.bus.journal import files

    journal = run / "journal"
    if not journal.is_dir() or not files(journal):
        return {}
    settings = read_json(run / "config.resolved.json")
    if settings.get("job", "rl") != "rl":
        return {}
    found = audit(
        journal,
        settings["rollout"]["samples_per_prompt"],
        settings["rollout"]["prompts_per_step"],
        max_data_failures=settings["reward"]["max_failures"],
        max_infra_failures=settings["bus"]["max_infra_failures"],
    )
    return {
        "samples_admitted": found.num_admitted,
        "samples_trained": found.num_trained,
        "samples_lost": found.num_lost,
        "samples_trained_twice": found.num_trained_twice,
        "samples_by_outcome": {name: num for name, num in found.outcomes.items() if num and name != "trained"},
        "staleness_histogram": {str(age): count for age, count in found.staleness.items()},
    }
