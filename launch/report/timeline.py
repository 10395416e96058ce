"""Reading a run's timeline back, and showing it: spans on one clock, and the Chrome trace of them.

Owns the reading of what `runtime/records/timeline.py` wrote, also while it is written, and the form of the trace. Does not judge
what the spans say: `steps.py` and `explain.py` do. Invariants: what is read a second time is read from where reading ended;
times of processes that share a clock stay exact to each other, others are lined up by wall time; in the trace the spans of
one row nest.

    reader = Reader(run / "timeline"); spans = reader.read()            # again later: what has come since
    trace = chrome_trace(spans, reader.figures)                         # opens in Perfetto and chrome://tracing
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.progress import at_work
from rondo.launch.rundir import existing_run
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.record import read_lines
from rondo.runtime.records.tail import Tail
from rondo.runtime.records.timeline import FLUSH_S, FOLDER, FORMAT

_NEAR_NS = int(5 * FLUSH_S * 1e9)
"""What happens is written so much later at the most."""
_SHOWN_AT = "https://ui.perfetto.dev or chrome://tracing"


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span. Times in nanoseconds since the epoch. `process` is "<group>.<rank>"; `still` open when it was written."""

    process: str
    name: str
    lane: str
    start: int
    end: int
    step: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    incarnation: int = 0
    still: bool = False

    @property
    def role(self) -> str:
        return self.lane.partition("/")[0]

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for an open span and its end."""
        return (self.process, self.incarnation, self.lane, self.name, self.start, self.args.get("group"))


@dataclass(frozen=True, slots=True)
class Figures:
    """Values of a process at one moment, in nanoseconds since the epoch."""

    process: str
    name: str
    at: int
    values: Mapping[str, float]
    incarnation: int = 0


@dataclass(slots=True)
class FileState:
    """How far a file was read, and whose it is."""

    offset: int = 0
    process: str = ""
    incarnation: int = 0
    shift: int | None = None
    """To be added to its times; None before the first line was read, and for a format that is not ours."""


class Reader:
    """Reads a timeline's folder again and again. `figures` grow with each `read`; take them away where a run is long."""

    def __init__(
        self, folder: Path, files: dict[Path, FileState] | None = None, clocks: dict[str, int] | None = None
    ) -> None:
        """files, clocks: of a reader before this one, which has read so far; both are kept up to date."""
        self._folder = folder
        self._files = {} if files is None else files
        self._clocks = {} if clocks is None else clocks
        self.figures: list[Figures] = []

    def read(self) -> list[SpanRecord]:
        """The spans that have come since the last call, in no order; a span may come open and, later, with its end."""
        found: list[SpanRecord] = []
        for path in self.paths():
            self.read_file(path, self._files[path], found)
        return found

    def paths(self) -> list[Path]:
        """All files that there are, those of a process in their order; what is known of others is forgotten."""
        paths = sorted(self._folder.glob("*/*.jsonl"))
        for gone in self._files.keys() - set(paths):
            del self._files[gone]
        for path in paths:
            self._files.setdefault(path, FileState())
        return paths

    def read_file(self, path: Path, file: FileState, found: list[SpanRecord], most: int = -1) -> None:
        """Adds what has come to one file, of so many bytes at most."""
        tail = Tail(path, file.offset)
        lines = tail.read(most)
        file.offset = tail.offset
        for fields in read_lines(lines, path):
            if isinstance(fields, list):
                if file.shift is not None:
                    name, lane, start, duration, step, args, still = fields
                    start += file.shift
                    found.append(
                        SpanRecord(
                            file.process, name, lane, start, start + duration, step, args or {}, file.incarnation,
                            bool(still),
                        )
                    )  # fmt: skip
            elif "timeline" in fields:
                if fields["timeline"] == FORMAT:
                    file.process = f"{fields['group']}.{fields['rank']}"
                    file.incarnation = fields["incarnation"]
                    # One anchor for all that share a clock, so that a step of wall time between two starts does no harm.
                    shift = fields["wall_ns"] - fields["monotonic_ns"]
                    file.shift = self._clocks.setdefault(fields["boot"], shift) if fields["boot"] else shift
            elif file.shift is not None:
                at = fields["at"] + file.shift
                self.figures.append(Figures(file.process, fields["name"], at, fields["values"], file.incarnation))


def whole_spans(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Each span once, as it was last seen, by start."""
    newest: dict[tuple[Any, ...], SpanRecord] = {}
    for span in spans:
        known = newest.get(span.key)
        if known is None or span.end >= known.end:
            newest[span.key] = span
    return sorted(newest.values(), key=lambda span: (span.start, -span.end))


def read_run(run: Path) -> tuple[list[SpanRecord], list[Figures]]:
    """What a run directory holds. ConfigError when it holds no span yet."""
    reader = Reader(run / FOLDER)
    spans = whole_spans(reader.read())
    if not spans:
        raise ConfigError(
            f"RUN must have a timeline, got none in {run / FOLDER}. Wait until its processes have started, or start it again"
        )
    return spans, reader.figures


def spans_between(run: Path, begin: int, end: int) -> list[SpanRecord]:
    """Each span that has a part between two times, in nanoseconds since the epoch, by start. Files that end before, or begin
    after, as the file system says, are not read; of a copied run, whose files have other times, all are."""
    found: list[SpanRecord] = []
    for near in (True, False):
        reader = Reader(run / FOLDER)
        for folder in sorted((run / FOLDER).glob("*/")):
            before = 0
            for path in sorted(folder.glob("*.jsonl")):
                written = path.stat().st_mtime_ns
                if not near or (written >= begin - _NEAR_NS and before <= end + _NEAR_NS):
                    reader.read_file(path, FileState(), found)
                before = written
        chosen = [span for span in whole_spans(found) if span.end >= begin and span.start <= end]
        if chosen:
            return chosen
    return []


# ---- steps ----------------------------------------------------------------------------------------------------------


def parse_steps(text: str | None) -> tuple[int | None, int | None]:
    """ "3:5" -> (3, 5): steps 3 and 4; an open end is None. ConfigError for anything else."""
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    if not all(re.fullmatch("[0-9]{0,9}", part) for part in (first, last)) or (not colon and not first):
        raise ConfigError(f"--steps must look like A:B, A: or :B, got {text!r}. Try 3:5 for steps 3 and 4")
    begin = int(first) if first else None
    end = (int(last) if last else None) if colon else int(first) + 1
    if begin is not None and end is not None and end <= begin:
        raise ConfigError(f"--steps must end after it begins, got {text!r}. Try {begin}:{begin + 1}")
    return begin, end


def spans_of_steps(spans: Sequence[SpanRecord], first: int | None, last: int | None) -> list[SpanRecord]:
    """What happened during steps `first` to `last - 1` of the trainer. ConfigError when none of them is there."""
    if first is None and last is None:
        return list(spans)
    steps = [span for span in spans if span.name == "step" and span.step is not None]
    chosen = [span for span in steps if (first or 0) <= (span.step or 0) and (last is None or (span.step or 0) < last)]
    if not chosen:
        there = sorted({span.step for span in steps if span.step is not None})
        known = f"{there[0]} to {there[-1]}" if there else "none yet"
        raise ConfigError(
            f"--steps must name steps of the timeline, got {first if first is not None else ''}:"
            f"{last if last is not None else ''}. It holds {known}"
        )
    begin, end = min(span.start for span in chosen), max(span.end for span in chosen)
    return [span for span in spans if span.end >= begin and span.start <= end]


# ---- the Chrome trace -----------------------------------------------------------------------------------------------


def chrome_trace(spans: Sequence[SpanRecord], figures: Sequence[Figures] = ()) -> dict[str, Any]:
    """The spans in Chrome's JSON form: a process row for each rank of each role group, a thread row for each lane.

    Times in microseconds from the first span. Spans of a lane that overlap without nesting get rows of their own.
    """
    zero = min((span.start for span in spans), default=0)
    until = max((span.end for span in spans), default=0)
    events: list[dict[str, Any]] = []
    processes = sorted({span.process for span in spans})
    for pid, process in enumerate(processes, 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        tids = itertools.count(1)
        own = [span for span in spans if span.process == process]
        for lane in sorted({span.lane for span in own}, key=lambda lane: (lane.startswith("waits/"), lane)):
            for number, row in enumerate(_rows([span for span in own if span.lane == lane]), 1):
                tid, name = next(tids), lane if number == 1 else f"{lane} {number}"
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
                events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})  # fmt: skip # noqa: E501
                events += [_event(span, pid, tid, zero) for span in row]
        events += _cores(pid, [f for f in figures if f.process == process and zero <= f.at <= until], zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: SpanRecord, pid: int, tid: int, zero: int) -> dict[str, Any]:
    args = dict(span.args)
    if span.step is not None:
        args["step"] = span.step
    if span.still:
        args["still_open"] = True
    return {
        "ph": "X", "name": span.name, "cat": span.role, "pid": pid, "tid": tid, "ts": (span.start - zero) / 1000,
        "dur": (span.end - span.start) / 1000, "args": args,
    }  # fmt: skip


def _rows(spans: Sequence[SpanRecord]) -> list[list[SpanRecord]]:
    """The spans of a lane in as few rows as make them nest, first come first."""
    rows: list[tuple[list[SpanRecord], list[int]]] = []  # the spans of a row, and the ends of those that are open in it
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for placed, ends in rows:  # noqa: B007  # the row that is found
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                break
        else:
            placed, ends = [], []
            rows.append((placed, ends))
        placed.append(span)
        ends.append(span.end)
    return [placed for placed, _ in rows]


def _cores(pid: int, figures: Sequence[Figures], zero: int) -> list[dict[str, Any]]:
    """Cores that a process keeps busy, between one look at its processor time and the next."""
    events = []
    looks = sorted((f for f in figures if f.name == "cpu"), key=lambda f: f.at)
    for before, after in itertools.pairwise(looks):
        if before.incarnation == after.incarnation and after.at > before.at:
            elapsed = (after.at - before.at) / 1e9
            cores = {name: (value - before.values.get(name, 0.0)) / elapsed for name, value in after.values.items()}
            events.append({"ph": "C", "name": "cores", "pid": pid, "ts": (before.at - zero) / 1000, "args": cores})
    return events


def newest_steps(spans: Sequence[SpanRecord], num_steps: int) -> tuple[int | None, int | None]:
    """The range of the newest steps; everything where no step has begun."""
    newest = max((span.step for span in spans if span.name == "step" and span.step is not None), default=None)
    return (None, None) if newest is None else (max(0, newest + 1 - num_steps), None)


def export(path: Path, out: Path | None, steps: str | None) -> int:
    """`rondo timeline RUN`: writes the trace and says where. ConfigError when there is nothing to write, or nowhere."""
    run, chosen = existing_run(path), parse_steps(steps)
    out = run / "trace.json" if out is None else out
    with at_work(f"writes what {run.name} did"):
        spans, figures = read_run(run)
        spans = spans_of_steps(spans, *chosen)
        try:
            out.write_bytes(orjson.dumps(chrome_trace(spans, figures)))
        except OSError as error:
            raise ConfigError(f"--out must be a file to write, got {out}: {error.strerror}. Choose another") from error
    num_processes = len({span.process for span in spans})
    print(f"{out}: {len(spans)} spans of {num_processes} processes. Open it in {_SHOWN_AT}")
    return 0
