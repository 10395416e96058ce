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
Over = Callable[[float], bool]
"""(seconds to wait for it) -> whether the run has ended."""


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


def follow(run: Path, config: TrackerConfig, over: Over) -> int:
    """Tells of a run until `over` says that it has ended and nothing is left; the number of the last point.
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


def _tell(tracker: Tracker, run: Path, file: Path, kept: dict[str, Any], over: Over) -> tuple[Points, dict[str, Any]]:
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
    with at_work(f"tells {to} of {run.name}"):
        number = follow(run, _config(run, to, chosen), over_without_owner(run))
    print(f"{to} has {number} points of {run.name}, of {sum(1 for _ in read_records(run / 'metrics.jsonl'))} records")
    return 0


def _config(run: Path, name: str, given: dict[str, Any]) -> TrackerConfig:
    settings = read_json(run / "config.resolved.json").get("trackers", [])
    asked = next((each for each in settings if each["name"] == name), {"name": name})
    return TrackerConfig.model_validate(asked | given)


def over_without_owner(run: Path) -> Over:
    """By hand: the run has ended when nobody owns it."""

    def over(wait_s: float) -> bool:
        is_over = owner(run) is None
        time.sleep(0 if is_over else wait_s)
        return is_over

    return over


def beside(name: str, tell: Callable[[Over], object]) -> None:
    """In a process of its own: the run has ended when stdin does."""
    os.nice(NICE)
    log_to_stderr({"tracker": name})
    try:
        tell(lambda wait_s: bool(select.select([sys.stdin], [], [], wait_s)[0]))
    except RondoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    path, service = Path(sys.argv[1]), sys.argv[2]
    beside(service, lambda over: follow(path, _config(path, service, {}), over))
