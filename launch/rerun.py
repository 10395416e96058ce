"""`rondo rerun RUN`: another run with the code and settings that one had, from the copies in its directory.

Owns the order: say what differs here and now, then start. Does not own the comparison (`differences.py`, `manifest.py`), nor the
run: it is one as any other, whose directory gets the next number. Nothing is refused: what differs may be what one wants to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rondo.launch.config import override
from rondo.launch.differences import differences
from rondo.launch.manifest import gathered, parted
from rondo.launch.report.view import say
from rondo.launch.rundir import environment, existing_run
from rondo.launch.train import TrainOptions, main, settings_of, work_where_it_began
from rondo.runtime.supervision.nursery import Nursery


def rerun(path: Path, *, sets: Sequence[str] = (), dry_run: bool = False, plain: bool = False) -> int:
    """The run's exit code; with `dry_run` 0, once what differs is said. ConfigError where the folder that the run was started in,
    or its data, are gone."""
    run = existing_run(path)
    work_where_it_began(run)
    config = override(settings_of(run), list(sets))
    say(f"comparing what {run.name} was made of with what is here: packages, code, machine, then data ...")
    found = differences(run, config)
    was, now = gathered(run), gathered(run, environment(run))
    others = [
        f"{part}: {name} was {a}, and is {b}"
        for part in ("packages", "machine")
        for name, a, b in parted(was[part], now[part])
        if not any(change.startswith(f"{name} was ") for change in found.changes)
    ]
    notes = [note.replace("the run goes on with its copy", "the copy is taken") for note in found.notes]
    for line in [*found.changes, *others]:
        say(f"differs: {line}")
    for text in sets:
        say(f"differs: {text}, as asked")
    for note in notes:
        say(f"note: {note}")
    if not (found.changes or others or sets):
        say("nothing differs: the same code, settings, data, packages and machine")
    if dry_run:
        return 0
    with Nursery() as nursery:
        return main(config, TrainOptions(run / "config.py", plain=plain), nursery)
