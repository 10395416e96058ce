"""Differences: what has changed around a run since it began, told a line each before `rondo resume` goes on with it.

Compared are the versions of Python and of packages, modules of the user's that lie outside the run directory, the run's copies of
the others, the data, and the files of the run directory that say what is trained. That the user's own files, from which they were
copied, were edited changes nothing for the run, and is only noted. Owns the comparison, and what is written down when changes are
accepted: from then on they are what the run has.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.comm.bus.serve import CONFIG as COORDINATOR_CONFIG
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.launch.check.data import DataProcess
from rondo.launch.code import FOLDER, TAKEN, copied, digest, seal
from rondo.launch.config import RunConfig
from rondo.launch.elastic.room import PREPARED
from rondo.launch.manifest import FILE as MANIFEST
from rondo.launch.rundir import CONFIG, ENVIRONMENT, PRIVATE, read_json, readable, write_json
from rondo.roles.data.fingerprints import FILE as FINGERPRINTS
from rondo.roles.data.fingerprints import Fingerprint
from rondo.runtime.checkpoints import RESETS, resets
from rondo.runtime.errors import ConfigError
from rondo.runtime.formats import version_of

_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Differences:
    """`changes` are of what the run does, `notes` are not; `data` is what opening them told, where they can be compared."""

    changes: tuple[str, ...]
    notes: tuple[str, ...]
    data: Mapping[str, Any] | None


def check_files(run: Path) -> None:
    """ConfigError for files of a run that its processes could not read, or models that are no longer where they were."""
    with readable(run / FOLDER / TAKEN):
        copied(run)
    with readable(run / COORDINATOR_CONFIG):
        CoordinatorConfig.load(run / COORDINATOR_CONFIG)
    with readable(run / RESETS):
        resets(run)
    with readable(run / PREPARED):
        prepared = read_json(run / PREPARED)
        models = {"model": prepared["model_path"], **prepared.get("teachers", {}), **prepared.get("judges", {})}
        places = {name: run / path for name, path in models.items()}  # one that a function has built lies in the run
        {name: int(first) for name, first in prepared["first_devices"].items()}
    for name, place in places.items():
        if not (place / "config.json").is_file():
            raise ConfigError(
                f"the {name} that the run began with must be there, got no config.json in {place}. Put the folder back, or "
                f"start another run"
            )


def differences(run: Path, config: RunConfig) -> Differences:
    """Of the run at `run`, whose settings are `config`. ConfigError for data that cannot be opened."""
    environment = read_json(run / ENVIRONMENT)
    data = None
    if (run / FINGERPRINTS).is_file():
        # There is a checkpoint: what the demonstrations of a warm-up show has been learnt.
        with DataProcess(config if config.job != "rl" else config.model_copy(update={"sft": None})) as opened:
            data = opened.answer(_LIMIT_S)
    with readable(run / ENVIRONMENT):
        changes = [*_of_versions(environment)]
    with readable(run / FOLDER / TAKEN):
        changes += _of_code(run, environment)
        notes = [
            f"{each.origin} {became}; the run goes on with its copy"
            for each in copied(run)
            if (became := _became(each.origin, each.digest)) is not None
        ]
    with readable(run / FINGERPRINTS):
        changes += _of_data(run, data)
    changes += _of_files(run)
    return Differences(tuple(changes), tuple(notes), data)


def refuse(found: Differences) -> None:
    """ConfigError that tells every change, if there is one."""
    if found.changes:
        lines = "".join(f"\n  {line}" for line in found.changes)
        raise ConfigError(
            f"a run must go on with what it began with, got {len(found.changes)} changed:{lines}\n"
            "Change it back, or go on with it: `rondo resume --accept-changes`"
        )


def accept(run: Path, config: RunConfig, found: Differences) -> None:
    """The run has these from now on. environment.json keeps what was accepted, and when."""
    environment = read_json(run / ENVIRONMENT)
    packages = {name: version_of(name) for name in environment["packages"]}
    environment |= {
        "python": platform.python_version(),
        "packages": {name: version for name, version in packages.items() if version is not None},
        "local_modules": {file: digest(Path(file)) for file in environment["local_modules"]},
        "accepted": [*environment.get("accepted", ()), {"time": time.time(), "changes": found.changes}],
    }
    write_json(run / ENVIRONMENT, environment, PRIVATE)
    seal(run)
    if found.data is not None:
        write_json(run / FINGERPRINTS, read_json(run / FINGERPRINTS) | found.data["fingerprints"])
        told, passes = read_json(run / COORDINATOR_CONFIG), config.data.num_passes
        told["rules"]["num_positions"] = None if passes is None else passes * found.data["rows"]
        if config.own is not None:
            told["rules"]["num_steps"] = config.own.num_steps(found.data["rows"])
            kept = read_json(run / CONFIG) | {"num_steps": told["rules"]["num_steps"]}
            write_json(run / CONFIG, kept, PRIVATE)
        write_json(run / COORDINATOR_CONFIG, told)


def _of_versions(environment: Mapping[str, Any]) -> Iterator[str]:
    versions = {"python": environment["python"], **environment["packages"]}
    for name, was in versions.items():
        now = platform.python_version() if name == "python" else version_of(name)
        if now != was:
            yield f"{name} was {was}, and is {now or 'gone'}"


def _of_code(run: Path, environment: Mapping[str, Any]) -> Iterator[str]:
    for each in copied(run):
        if (became := _became(each.path, each.digest)) is not None:
            yield f"{each.path}, a copy that the run made, {became}"
    for file, was in environment.get("local_modules", {}).items():
        if (became := _became(Path(file), was)) is not None:
            yield f"{file}, which the run's code imports, {became}"


def _of_data(run: Path, data: Mapping[str, Any] | None) -> Iterator[str]:
    known = read_json(run / FINGERPRINTS) if data is not None else {}
    for name, found in data["fingerprints"].items() if data is not None else ():
        was, now = Fingerprint(**known[name]), Fingerprint(**found)
        if was != now:
            yield f"{name} had {was}, and has {now}"


def _of_files(run: Path) -> Iterator[str]:
    """Files that say what is trained, which only a resume that accepts changes writes again."""
    known: Mapping[str, Any] = {}
    with suppress(ConfigError):  # it only tells
        known = read_json(run / MANIFEST)
    for part, name in (("settings", CONFIG), ("rules", COORDINATOR_CONFIG)):
        if part in known and (became := _became(run / name, known[part])) is not None:
            yield f"{name}, which the run wrote, {became}"
    if known.get("data") and not (run / FINGERPRINTS).is_file():
        yield f"{FINGERPRINTS}, which the run wrote, is gone"


def _became(file: Path, was: str | None) -> str | None:
    now = digest(file)
    return None if now == was else "was changed" if now is not None else "is gone"
