"""Keeping: which checkpoints of a run stay, which is the best, and the user's function after each save.

Owns these three, beside the supervisor. Does not own writing checkpoints (`models/checkpoint.py`) or which are whole
(`runtime/checkpoints.py`). Everything follows from what lies on the disk and what was told, so a resumed run goes on with it.

    runs/quickstart/
      best -> checkpoints/step_000040
      best.json         {"metric": "pass@1", "mode": "max", "step": 40, "value": 0.61}
      after_save.json   {"40": {"marker": ..., "error": null}}

Invariant: the newest `train.keep_checkpoints` stay, the best one by `train.best`, those that an evaluation is still to say
something of, and those that the user's function has not come to the end with. Of equal ones the earlier is best. The function is
called for every save in turn, in a process of its own under a deadline; whatever it does, the run goes on. Where a run ends while
it is under way, it is called again for the same save when the run goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rondo.comm.bus.evaluations import ASKED
from rondo.launch.report.records import evaluation_figures, is_step, read_metrics
from rondo.launch.rundir import BEST, point, read_json, write_json
from rondo.roles.config import AfterSaveConfig, BestConfig, TrainConfig
from rondo.runtime.checkpoints import MARKER, complete, rotate, version_of
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.processes.pool import Pool
from rondo.runtime.records.telling import telling
from rondo.runtime.reference import load_reference
from rondo.runtime.values import encode

BEST_RECORD, AFTER_SAVE = "best.json", "after_save.json"
Tell = Callable[[str, Mapping[str, Any]], None]
"""(kind, data) of a record for events.jsonl."""
_LOOK_S = 0.2


class Values:
    """The metric of `train.best` by policy version: a figure of the evaluations, or one that every step has."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self.by_version: dict[int, float] = {}
        self.evaluated = -1
        """Versions up to this one have been evaluated, or will not be: evaluations beside the training come in order."""
        self.skipped: set[int] = set()
        """Versions whose evaluation was left out; one before it may still be under way."""
        self.seen: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> None:
        """A record of metrics.jsonl or events.jsonl, in their order."""
        if is_step(record):
            version = int(record["version"])
            # It is only now made: what is known of it, or of a later one, was of an attempt that was given up.
            self.by_version = {known: value for known, value in self.by_version.items() if known < version}
            self.evaluated = min(self.evaluated, version - 1)
            self.skipped = {known for known in self.skipped if known < version}
            self._add(version, record)
        elif "evaluation" in record:
            found = record["evaluation"]
            if found.get("label", "").startswith(ASKED):  # of any version, and any sets
                return
            if found.get("label") != "end":  # which may come before those beside the training, that come in their order
                self.evaluated = max(self.evaluated, int(found["version"]))
            sets = found.get("sets", {}).items()
            named = {f"{name}.{figure}": value for name, figures in sets for figure, value in figures.items()}
            self._add(found["version"], named | evaluation_figures(found))
        elif record.get("kind") == "evaluation_skipped":
            self.skipped.add(int(record["version"]))

    def _add(self, version: int, figures: Mapping[str, Any]) -> None:
        self.seen.update(name for name, value in figures.items() if isinstance(value, int | float))
        value = figures.get(self._metric)
        if isinstance(value, int | float) and math.isfinite(value):
            self.by_version[version] = float(value)


class Keeper:
    """Of a run in the folder `run`. `on_event` gets the run's records."""

    def __init__(
        self, run: Path, train: TrainConfig, tell: Tell, *, evaluates_every: int | None = None, load_s: float
    ) -> None:
        """evaluates_every: steps from one evaluation beside the training to the next; load_s: what the user's function may
        take to load."""
        self._run, self._train, self._tell, self._load_s = run.absolute(), train, tell, load_s
        self._every = evaluates_every
        self._best: BestConfig | None = train.best
        self._values = Values(train.best.metric if train.best is not None else "")
        for record in read_metrics(run / "metrics.jsonl") if train.best is not None else ():
            self._values.add(record)
        self._ending = False
        self._changed = asyncio.Event()
        self._changed.set()
        self._is_told = False

    def on_event(self, record: Mapping[str, Any]) -> None:
        self._values.add(record)
        if "evaluation" in record or record.get("kind") in ("checkpoint", "evaluation_skipped"):
            self._changed.set()

    async def run(self) -> None:
        """Until `finish` has been said and done."""
        ending = False
        while not ending:
            await self._changed.wait()
            self._changed.clear()
            ending = self._ending
            with telling("checkpoints"):
                await self._step()

    async def finish(self, running: asyncio.Task[None], is_stopped: Callable[[], bool]) -> None:
        """Lets `run` come to its end with what came last, once nothing else of the run works any more; or until somebody asks for
        a stop."""
        self._ending = True
        self._changed.set()
        while not running.done() and not is_stopped():
            await asyncio.wait([running], timeout=_LOOK_S)
        if running.cancel():
            why = "a stop was asked for. It is called again for this save when the run goes on"
            self._tell("after_save_cut_off", {"why": why})

    async def _step(self) -> None:
        await asyncio.to_thread(self._keep)
        hook = self._train.after_save
        while hook is not None and (folder := self._unseen(complete(self._run / "checkpoints"))):
            await self._call(hook, folder[0])
            await asyncio.to_thread(self._keep)

    # ---- what stays -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        checkpoints = self._run / "checkpoints"
        whole = complete(checkpoints)
        held = {version_of(folder) for folder in self._unseen(whole)} if self._train.after_save is not None else set()
        if self._best is not None:
            held |= self._choose([version_of(folder) for folder in whole])
        rotate(checkpoints, self._train.keep_checkpoints, held)

    def _choose(self, versions: list[int]) -> set[int]:
        """Points at the best; it, and those of which nothing is known yet."""
        assert self._best is not None
        values, metric, mode = self._values.by_version, self._best.metric, self._best.mode
        pending = set[int]()
        if "@" in metric and self._every is not None:
            known = values.keys() | self._values.skipped
            pending = {v for v in versions if v % self._every == 0 and v > self._values.evaluated and v not in known}
        elif versions and metric not in self._values.seen and self._values.seen and not self._is_told:
            self._is_told = True
            seen = ", ".join(sorted(self._values.seen))
            self._tell(
                "no_best", {"why": f"train.best.metric must be a metric of the run, got {metric!r} among {seen}"}
            )
        known_of = [version for version in versions if version in values]
        if not known_of:
            return pending
        sign = 1 if mode == "max" else -1
        best = max(known_of, key=lambda version: (sign * values[version], -version))
        record = {"metric": metric, "mode": mode, "step": best, "value": values[best]}
        if record != _read(self._run / BEST_RECORD):
            write_json(self._run / BEST_RECORD, record)
            self._tell("best_checkpoint", {name: record[name] for name in ("metric", "step", "value")})
        point(self._run / BEST, f"checkpoints/step_{best:06d}")
        return pending | {best}

    # ---- the user's function ----------------------------------------------------------------------------------------

    def _unseen(self, whole: list[Path]) -> list[Path]:
        """Checkpoints that the function has not come to the end with, oldest first. A version that was made again is another."""
        seen = _read(self._run / AFTER_SAVE)
        return [folder for folder in whole if seen.get(str(version_of(folder)), {}).get("marker") != _marker(folder)]

    async def _call(self, hook: AfterSaveConfig, folder: Path) -> None:
        version, marker = version_of(folder), _marker(folder)
        pool = Pool(
            f"{open_after_save.__module__}:{open_after_save.__name__}", {"function": hook.function}, work="after_save",
            source="train.after_save.function", deadline_s=hook.deadline_s, load_deadline_s=self._load_s,
        )  # fmt: skip
        try:
            async with pool:
                [outcome] = await pool.run([encode([str(folder), version])])
            error = outcome.brief
        except RondoError as failed:
            error = str(failed)
        seen = {name: told for name, told in _read(self._run / AFTER_SAVE).items() if name != str(version)}
        write_json(self._run / AFTER_SAVE, seen | {str(version): {"marker": marker, "error": error}})
        num_failed = sum(told["error"] is not None for told in seen.values()) + (error is not None)
        if error is None:
            self._tell("after_save", {"step": version})
        else:
            self._tell("after_save_failed", {"step": version, "num_failed": num_failed, "why": error})


def open_after_save(function: str) -> Callable[[list[Any]], None]:
    """What a process of the function runs on (path, step)."""
    call = load_reference(function, "train.after_save.function")

    def run(item: list[Any]) -> None:
        call(*item)

    return run


def _marker(folder: Path) -> int:
    return (folder / MARKER).stat().st_mtime_ns


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ConfigError:  # none yet
        return {}
