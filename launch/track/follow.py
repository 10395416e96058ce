"""Follow: one tracker is told of one run, from its cursor on, each point once.

Owns the cursor, and who may move it. Does not own the points (`points.py`) or how a service takes them (`trackers/`).

    RUN/trackers/wandb.json     {"to": {...}, "id": "4f...", "begun": 1760000000, "points": {"offset": 81920, "number": 40, ...}}
    RUN/trackers/wandb.log      what its process said

Invariant: the cursor moves only after `flush` returned, so that nothing is lost; a tracker that knows the number of the last
point that its service has says so (`last`), and is given those behind it, whatever the cursor says; one that does not know it is
given points of the same step and name again, which its service takes for one. One process at a time follows for one tracker.

    python -m rondo.launch.track.follow RUN wandb        beside a run; ends when its stdin does, and all is told
    rondo track RUN --to wandb                           by hand, of a run that is over or goes on
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rondo.launch.progress import at_work
from rondo.launch.report.records import read_records
from rondo.launch.report.timeline import SpanRecord
from rondo.launch.rundir import existing_run, owner, read_json, write_json
from rondo.launch.track.beside import FOLDER
from rondo.launch.track.points import Point, Points
from rondo.launch.track.settings import TrackerConfig, missing
from rondo.launch.track.spans import Spans
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.records.record import log_to_stderr
from rondo.runtime.records.timeline import FOLDER as TIMELINE

PERIOD_S = 2.0
NICE = 19
_TOLD = ("job", "seed", "num_steps", "max_staleness", "model", "algorithm", "train", "rollout")
"""Of the settings; the others hold paths, addresses and environments."""
_SUPERVISOR = "supervisor.0"
_UNTOLD = ("sglang", "environment", "endpoint")


class Tracker(Protocol):
    """A service with a run open in it; made by the `open(run, config)` of a file of trackers/, which may raise anything. One that
    takes spans has a method `span(SpanRecord)`, too."""

    last: int | None
    """The number of the last point that the service has for certain, 0 for none; None where it does not say."""

    def log(self, point: Point) -> None: ...

    def flush(self) -> bool:
        """Whether what was logged is now where it outlives this process. False of one that knows so only when it is closed, and
        is told all of this life again after a death."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """What a tracker is told of a run. `id` is the same each time that it goes on, `begun` when it was told of first."""

    path: Path
    name: str
    id: str
    begun: int
    settings: dict[str, str | int | float | bool]


def follow(run: Path, config: TrackerConfig, over: Callable[[float], bool]) -> int:
    """Tells of a run until `over(seconds to wait)` says that it has ended and nothing is left; the number of the last point.
    ConfigError where the package is missing, or another process follows for this tracker."""
    if (line := missing(config.name)) is not None:
        raise ConfigError(line)
    with cursor(run, config.name, config.model_dump(mode="json")) as (file, kept):
        about = Run(run, config.run or run.name, kept["id"], kept["begun"], _settings(run))
        tracker: Tracker = import_module(f"rondo.launch.track.trackers.{config.name}").open(about, config)
        with contextlib.closing(tracker):
            points, places = _tell(tracker, run, file, kept, over)
        write_json(file, kept | places)
        return points.number


def _tell(
    tracker: Tracker, run: Path, file: Path, kept: dict[str, Any], over: Callable[[float], bool]
) -> tuple[Points, dict[str, Any]]:
    points, has = Points(run / "metrics.jsonl", kept.get("points")), tracker.last
    if has is not None and has < points.number:
        points = Points(run / "metrics.jsonl")
    take: Callable[[SpanRecord], None] | None = getattr(tracker, "span", None)
    spans = None if take is None else Spans(run / TIMELINE, kept.get("spans"))
    while True:
        is_over = over(0)  # before the look, which then sees all
        batch = points.read()
        for point in batch:
            if has is None or point.number > has:
                tracker.log(point)
        ended: list[SpanRecord] = []
        if spans is not None and not batch:
            ended = spans.read(is_over=is_over, living=_SUPERVISOR if owner(run) is not None else "")
        for span in ended:
            assert take is not None
            take(span)
        places = {"points": points.state()} | ({} if spans is None else {"spans": spans.state()})
        if batch or ended:
            if tracker.flush():
                write_json(file, kept | places)
        elif is_over:
            return points, places
        else:
            over(PERIOD_S)


@contextlib.contextmanager
def cursor(run: Path, name: str, to: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The cursor's file and what it says, for this process alone. Another destination is told all from the beginning."""
    folder = run / FOLDER
    file = folder / f"{name}.json"
    try:
        folder.mkdir(exist_ok=True)
        opened = (folder / f".{name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"{folder} must be writable, since it holds how far {name} was told, got: {error.strerror}. Copy the run "
            "directory to where you may write, and track the copy"
        ) from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"one process at a time must tell {name} of {run}, got another. The run itself does, while it goes on"
            ) from None
        os.register_at_fork(after_in_child=lock.close)  # what a service's package forks may outlive this process
        kept = read_json(file) if file.exists() else {}
        if kept.get("to") != to:
            kept = {"to": to, "id": uuid.uuid4().hex[:16], "begun": int(time.time())}
            write_json(file, kept)
        yield file, kept


def _settings(run: Path) -> dict[str, str | int | float | bool]:
    """What the run trains, as "train.lr": value."""
    found: dict[str, str | int | float | bool] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in _UNTOLD:
                    walk(f"{prefix}.{name}" if prefix else name, inner)
        elif isinstance(value, str | int | float | bool):
            found[prefix] = value

    settings = read_json(run / "config.resolved.json")
    walk("", {name: settings[name] for name in _TOLD if name in settings})
    return found


def by_hand(path: Path, to: str, **given: Any) -> int:
    """`rondo track`: as the run's own settings say, where they name the tracker, but for what is given."""
    run = existing_run(path)
    chosen = {name: value for name, value in given.items() if value not in (None, False)}
    settings = read_json(run / "config.resolved.json").get("trackers", [])
    asked = next((each for each in settings if each["name"] == to), {"name": to})
    config = TrackerConfig.model_validate(asked | chosen)

    def over(wait_s: float) -> bool:
        is_over = owner(run) is None
        if wait_s and not is_over:
            time.sleep(wait_s)
        return is_over

    with at_work(f"tells {to} of {run.name}"):
        number = follow(run, config, over)
    print(f"{to} has {number} points of {run.name}, of {sum(1 for _ in read_records(run / 'metrics.jsonl'))} records")
    return 0


def beside(run: Path, name: str) -> int:
    """In a process of its own: until stdin ends, with which the run says that it has."""
    os.nice(NICE)
    log_to_stderr({"tracker": name})
    settings = read_json(run / "config.resolved.json")["trackers"]
    config = TrackerConfig.model_validate(next(each for each in settings if each["name"] == name))
    follow(run, config, lambda wait_s: bool(select.select([sys.stdin], [], [], wait_s)[0]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(beside(Path(sys.argv[1]), sys.argv[2]))
    except RondoError as error:
        sys.exit(str(error))
