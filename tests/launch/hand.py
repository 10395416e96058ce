"""Hand-made spans: a small run of a trainer, a rollout and a reference, in tenths of a second. And what a trace must not have."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rondo.launch.report.timeline import SpanRecord

TENTH = 100_000_000


def span(
    process: str,
    name: str,
    start: float,
    end: float,
    step: int | None = None,
    lane: str = "",
    incarnation: int = 0,
    **args: Any,
) -> SpanRecord:
    """A span from `start` to `end`, in tenths of a second; its lane is the role unless it is named."""
    role = process.partition("-")[0]
    return SpanRecord(process, name, lane or role, round(start * TENTH), round(end * TENTH), step, args, incarnation)


def generated(group: int, start: float, end: float, step: int, *, scored: float | None = None) -> list[SpanRecord]:
    """A prompt group at rollout-0.0, its last reward from `scored` to the end."""
    scored = end - 1 if scored is None else scored
    return [
        span("rollout-0.0", "generate", start, end, step, group=group),
        span("rollout-0.0", "reward", scored, end, step, "rollout/reward", group=group),
    ]


def one_step(at: float = 0.0, step: int = 0) -> list[SpanRecord]:
    """A step of 100 tenths: the trainer waits 60, trains 30, commits 6, publishes 3; 1 is nothing it tells of.

    The rollout begins 10 into the wait, generates until 40, its reward takes until 45; the reference ends at 58.
    """
    first, second = 2 * step, 2 * step + 1
    return [
        span("actor-0.0", "step", at, at + 100, step),
        span("actor-0.0", "wait for a round", at, at + 60, step, groups=[first, second]),
        span("actor-0.0", "train", at + 60, at + 90, step),
        span("actor-0.0", "commit", at + 90, at + 96, step),
        span("actor-0.0", "publish", at + 96, at + 99, step),
        *generated(first, at + 10, at + 30, step),
        *generated(second, at + 10, at + 45, step, scored=at + 40),
        span("rollout-0.0", "wait for a lease", at, at + 10, lane="rollout/leases"),
        span("rollout-0.0", "wait for a lease", at + 12, at + 100, lane="rollout/leases"),
        span("reference-0.0", "wait for a round", at, at + 46, step, groups=[first, second]),
        span("reference-0.0", "forward", at + 46, at + 58, step, groups=[first, second]),
        span("reference-0.0", "wait for a round", at + 58, at + 100),
    ]


def crossing(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs of spans of one row that overlap without nesting."""
    rows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            # In whole nanoseconds: sums of floats differ in their last bit where spans end together.
            start, end = round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))
            rows[event["pid"], event["tid"]].append((start, end, event["name"]))
    found = []
    for row in rows.values():
        for start, end, name in row:
            found += [(name, other) for begin, until, other in row if start < begin < end < until]
    return found
