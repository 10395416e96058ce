"""Who waited for whom in each step, from the spans of all processes: one record a step.

Owns the rules by which waiting is told apart, and the file of records. Does not own what they mean for a run: `explain.py`
does. Pure but for `Records`.

A step is cut at the edges of the trainer's own spans, so its parts sum to the step. The trainer's wait for a round with prompt
groups G is told apart by what those groups were still missing:

    began to wait                                                                            the round came
    |-- weights ---|------- rollout -------|- reward -|---- actor_fwd, reference, ... -----|- coordinator -|
       last group     its samples are        its last    the column of G that came last       index, message
       has no lease   being generated        reward
       (or rollout, where that is busy)

What of it passes while every process of that role is starting, at first or again, is told apart as "start of <role>".

Every other role waits for `actor` where nothing may be generated yet, else for `rollout`. A trainer's wait for rollout, from
when nine in ten of the step's prompt groups were there to the last of them, is its wait for the longest trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rondo.launch.report.intervals import Interval, intersect, length, subtract, union
from rondo.launch.report.records import last_records, read_records
from rondo.launch.report.timeline import Reader, SpanRecord, whole_spans
from rondo.runtime.checkpoints import GOES_ON
from rondo.runtime.records.record import JsonLines
from rondo.runtime.records.timeline import FLUSH_S, FOLDER

FILE = "steps.jsonl"
"""In the timeline's folder."""
_LATE_NS = int(3 * FLUSH_S * 1e9)
"""After so long every process has written down what happened."""
_ROUNDING_NS = 1000
"""Of a time in seconds since the epoch."""
_MOST_OF = 0.9
_WAIT = "wait for a round"


@dataclass(frozen=True, slots=True)
class RoleUse:
    """A role during one step. Seconds are sums over its processes."""

    num_processes: int
    busy_s: float
    waits_s: Mapping[str, float]
    """For whom it waited; busy, waits and what is neither make up the step, for each process."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the trainer, as its first rank saw it. `start` in seconds since the epoch."""

    step: int
    start: float
    step_s: float
    trainer: Mapping[str, float]
    """Its parts, in seconds: "train", "commit", ..., "wait for <role>", "start of <role>", "other". They sum to `step_s`."""
    longest_s: float
    """The trainer's wait for the step's longest trajectories, a part of its wait for rollout."""
    roles: Mapping[str, RoleUse]


def steps_of(spans: Sequence[SpanRecord], *, after: int = 0) -> list[Step]:
    """The committed steps among `spans` that began after `after` (nanoseconds since the epoch), in order of time."""
    return [told.step() for told in _told(whole_spans(spans), after)]


def critical_path(spans: Sequence[SpanRecord], steps: Collection[int]) -> list[tuple[str, int, int]]:
    """(name, start, end) of what held up the trainer, piece by piece, in order of time: its own work, and in its waits whoever it
    waited for. Of those steps, committed or not yet."""
    told = [each for each in _told(whole_spans(spans), committed=False) if each.number in steps]
    pieces = [(name, *piece) for each in told for name, found in each.parts().items() for piece in found]
    return sorted(pieces, key=lambda piece: piece[1:])


def _told(spans: Sequence[SpanRecord], after: int = 0, *, committed: bool = True) -> Iterator[_Told]:
    actor = min((s.process for s in spans if s.name == "step" and s.role == "actor"), default=None)
    own = [s for s in spans if s.process == actor and s.lane == "actor"]
    # Beside the next step, or at the end of their own.
    commits = {
        (s.step, s.incarnation)
        for s in spans
        if s.process == actor and s.role == "actor" and s.name == "commit" and not s.still
    }
    windows = [s for s in own if s.name == "step" and not s.still]
    if committed:
        windows = [s for s in windows if (s.step, s.incarnation) in commits]
    near: list[SpanRecord] = []
    rest = iter(spans)  # by start, as the windows are: each span is looked at in its own steps only
    held = next(rest, None)
    for window in windows:
        near = [s for s in near if s.end > window.start]
        while held is not None and held.start < window.end:
            if held.end > window.start:
                near.append(held)
            held = next(rest, None)
        if window.start >= after:
            yield _Told(near, actor, window)


class _Told:
    """One step while its record is made."""

    def __init__(self, spans: Sequence[SpanRecord], actor: str | None, window: SpanRecord) -> None:
        self._window = window
        self.number = window.step or 0
        self._whole: list[Interval] = [(window.start, window.end)]
        self._spans = spans
        self._own = [s for s in spans if s.process == actor and s.lane == "actor" and s is not window]
        self._round_waits = [s for s in self._own if s.name == _WAIT]
        self._generating = union((s.start, s.end) for s in self._spans if s.name == "generate" and s.lane == "rollout")

    def parts(self) -> dict[str, list[Interval]]:
        """When the trainer did what, or waited for whom."""
        waits = self._round_waits
        waited = intersect(union((s.start, s.end) for s in waits), self._whole)
        parts = _innermost([s for s in self._own if s.name != _WAIT], subtract(self._whole, waited))
        for wait in waits:
            for whom, pieces in self._missing(wait).items():
                role = "rollout" if whom in ("weights", "reward") else whom
                starting = self._starting(role)
                parts.setdefault(f"start of {role}", []).extend(intersect(union(pieces), starting))
                parts.setdefault(f"wait for {whom}", []).extend(subtract(union(pieces), starting))
        parts["other"] = subtract(self._whole, union(piece for found in parts.values() for piece in found))
        return parts

    def step(self) -> Step:
        window, parts = self._window, self.parts()
        seconds = {name: length(pieces) / 1e9 for name, pieces in parts.items() if pieces or name == "other"}
        return Step(
            step=self.number,
            start=window.start / 1e9,
            step_s=(window.end - window.start) / 1e9,
            trainer=seconds,
            longest_s=length(intersect(union(parts.get("wait for rollout", [])), self._tail(self._round_waits))) / 1e9,
            roles=self._roles(),
        )

    def _missing(self, wait: SpanRecord) -> dict[str, list[Interval]]:
        """Whom the trainer waited for, from when to when: the parts of one wait."""
        begin, end = max(wait.start, self._window.start), min(wait.end, self._window.end)
        if begin >= end:
            return {}
        groups = set(wait.args.get("groups", ()))
        found: dict[str, list[Interval]] = {}
        at = begin
        made = self._last(s for s in self._spans if s.name == "generate" and s.args.get("group") in groups)
        if made is not None and made.end > at:
            until = min(made.end, end)
            if made.start > at:  # nobody has begun with it
                early = [(at, min(made.start, until))]
                found["rollout"] = intersect(early, self._generating)
                found["weights"] = subtract(early, self._generating)
                at = early[0][1]
            group = made.args.get("group")
            scored = self._last(s for s in self._spans if s.name == "reward" and s.args.get("group") == group)
            generated = until if scored is None else min(max(scored.start, at), until)
            found.setdefault("rollout", []).append((at, generated))
            found["reward"] = [(generated, until)]
            at = until
        last = self._last(
            s
            for s in self._spans
            if s.role not in ("actor", "rollout")
            and s.name != _WAIT
            and not groups.isdisjoint(s.args.get("groups", ()))
        )
        if last is not None and last.end > at:
            found[last.role] = [(at, min(last.end, end))]
            at = min(last.end, end)
        if not groups:  # a round without rows for this rank, or none
            found["rollout"] = intersect([(at, end)], self._generating)
            found["coordinator"] = subtract([(at, end)], self._generating)
        else:
            found["coordinator"] = [(at, end)]
        return found

    def _starting(self, role: str) -> list[Interval]:
        """When no process of a role was there to work: from the end of its old incarnation to what follows its load."""
        down = self._whole
        processes = {s.process for s in self._spans if s.role == role}
        for process in processes:
            own = [s for s in self._spans if s.process == process and s.role == role]
            gaps = []
            for load in (s for s in own if s.name == "load"):
                old = [s.end for s in own if s.incarnation < load.incarnation]
                gaps.append((max(old, default=self._window.start), load.end))
            down = intersect(down, union(gaps))
        return down if processes else []

    def _tail(self, waits: Iterable[SpanRecord]) -> list[Interval]:
        """From when most of the step's prompt groups were there to when all were."""
        groups = {group for wait in waits for group in wait.args.get("groups", ())}
        ends = dict.fromkeys(groups, self._window.start)  # of which nothing is seen was there before
        for made in self._spans:
            group = made.args.get("group")
            if made.name == "generate" and group in ends:
                ends[group] = max(ends[group], made.end)
        if len(ends) < 2:
            return []
        in_order = sorted(ends.values())
        return union([(in_order[max(1, int(_MOST_OF * len(in_order))) - 1], in_order[-1])])

    def _roles(self) -> dict[str, RoleUse]:
        """What each role did, and whom it waited for."""
        inside = [s for s in self._spans if not s.lane.startswith("waits/")]
        evaluating = union((s.start, s.end) for s in inside if s.name == "evaluate")
        uses: dict[str, RoleUse] = {}
        for role in sorted({s.role for s in inside}):
            of_role = [s for s in inside if s.role == role]
            processes = sorted({s.process for s in of_role})
            busy_ns, waits_ns = 0, dict[str, int]()
            for process in processes:
                own = [s for s in of_role if s.process == process]
                busy = self._inside(s for s in own if s.lane == role and not _waits(s) and s.name != "step")
                busy_ns += length(busy)
                idle = intersect(subtract(self._whole, busy), self._inside(s for s in own if _waits(s)))
                if role == "actor":
                    continue  # the step's own parts tell it, better
                if role == "rollout":
                    pieces = {"evaluation": intersect(idle, evaluating), "actor": subtract(idle, evaluating)}
                else:
                    pieces = {
                        "rollout": intersect(idle, self._generating), "actor": subtract(idle, self._generating)
                    }  # fmt: skip
                for whom, waited in pieces.items():
                    waits_ns[whom] = waits_ns.get(whom, 0) + length(waited)
            uses[role] = RoleUse(
                len(processes), busy_ns / 1e9, {whom: waited / 1e9 for whom, waited in waits_ns.items() if waited}
            )
        return uses

    def _inside(self, spans: Iterable[SpanRecord]) -> list[Interval]:
        return intersect(union((s.start, s.end) for s in spans), self._whole)

    def _last(self, spans: Iterable[SpanRecord]) -> SpanRecord | None:
        return max(spans, key=lambda s: s.end, default=None)


def _waits(span: SpanRecord) -> bool:
    return span.name.startswith("wait for ")


def _innermost(spans: Sequence[SpanRecord], within: Sequence[Interval]) -> dict[str, list[Interval]]:
    """Name -> when, of the time `within`, spans of that name were the innermost ones. Spans of one lane, which nest."""
    found: dict[str, list[Interval]] = {}
    taken: list[Interval] = []
    for span in sorted(spans, key=lambda span: span.end - span.start):  # what lies inside is shorter
        pieces = subtract(intersect([(span.start, span.end)], within), taken)
        found.setdefault(span.name, []).extend(pieces)
        taken = union([*taken, *pieces])
    return found


# ---- the records of a run -------------------------------------------------------------------------------------------


class Records:
    """The steps of a run, each written once when it is over, in `timeline/steps.jsonl`. For one process: the leader's.
    `clock` gives nanoseconds since the epoch."""

    def __init__(self, run: Path, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._folder = run / FOLDER
        self._reader = Reader(self._folder)
        self._spans: list[SpanRecord] = []
        ends = (r["start"] + r["step_s"] for r in read_records(self._folder / FILE))
        self._told = round(max(ends, default=0.0) * 1e9) - _ROUNDING_NS

    def advance(self, *, final: bool = False) -> list[Step]:
        """Writes the steps that are over by now and returns them; `final`: every process has ended."""
        self._spans = whole_spans([*self._spans, *self._reader.read()])
        self._reader.figures.clear()
        until = self._clock() - (0 if final else _LATE_NS)
        found = [s for s in steps_of(self._spans, after=self._told) if final or (s.start + s.step_s) * 1e9 < until]
        if found:
            self._folder.mkdir(exist_ok=True)
            with JsonLines(self._folder / FILE) as lines:
                for step in found:
                    lines.write(asdict(step))
            self._told = round((found[-1].start + found[-1].step_s) * 1e9) - _ROUNDING_NS
        self._spans = [s for s in self._spans if s.end > self._told]
        return found


def read_steps(run: Path, spans: Sequence[SpanRecord]) -> list[Step]:
    """All steps of a run in order, each as it was trained last: from its records, and from `spans` what is not there yet."""
    went_back = [r for r in read_records(run / "metrics.jsonl") if GOES_ON in r]
    steps = {
        record["step"]: _step(record)
        for record in read_records(run / FOLDER / FILE)
        if not any(record["step"] >= r[GOES_ON] and record["start"] < r["time"] for r in went_back)
    }
    told = max((round((s.start + s.step_s) * 1e9) for s in steps.values()), default=0)
    after = max([told - _ROUNDING_NS, *(round(r["time"] * 1e9) for r in went_back)])
    steps |= {step.step: step for step in steps_of(spans, after=after)}
    return [steps[number] for number in sorted(steps)]


def _step(record: Mapping[str, Any]) -> Step:
    roles = {name: RoleUse(**use) for name, use in record["roles"].items()}
    names = ("step", "start", "step_s", "trainer", "longest_s")
    return Step(**{name: record[name] for name in names}, roles=roles)


def newest_steps(run: Path, num_steps: int, num_bytes: int = 256 << 10) -> list[Step]:
    """The last records of a run, in order of steps, from the end of their file alone."""
    steps = dict[int, Step]()
    for record in last_records(run / FOLDER / FILE, num_bytes):
        steps = {step: told for step, told in steps.items() if step < record["step"]} | {record["step"]: _step(record)}
    return [steps[number] for number in sorted(steps)][-num_steps:]
