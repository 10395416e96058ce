"""Unfinished episodes: what was sampled of them, in files of the run directory, so that they outlive the replica that has them.

Owns the names of the files, reading them back, and what of them counts in a new attempt. Does not own what a record says
(`roles/sampling/kept_turns.py`), who writes (the holder of a group's lease, a file for each lease) or who goes on (the next one).

    episodes/7.0.jsonl      of group 7 under its first lease; 7.1.jsonl under the next; gone when the group has ended
        {"place": ..., "newest": 3, ...}        a record; `newest`: the youngest policy version of what it holds

Invariant: what an attempt reads was sampled under versions that its weights come from.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.records.record import read_lines
from rondo.runtime.records.telling import telling

FOLDER = "episodes"


def file_of(run_dir: Path, group: int, epoch: int) -> Path:
    return run_dir / FOLDER / f"{group}.{epoch}.jsonl"


def append(path: Path, lines: bytes) -> None:
    """With one `write(2)`. OSError where it cannot be written whole."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        return append(path, lines)
    try:
        if (written := os.write(file, lines)) != len(lines):
            raise OSError(f"a record must be written whole to {path}, got {written} of {len(lines)} bytes")
    finally:
        os.close(file)


def files_of(run_dir: Path, group: int, epoch: int) -> list[Path]:
    """Those of earlier leases, in their order."""
    found = (file_of(run_dir, group, each) for each in range(epoch))
    return [path for path in found if path.exists()]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Of one file; what a full disk or a death tore is left out, and of a file that cannot be read the rest."""
    with telling("unfinished episodes"), path.open("rb") as lines:
        yield from (each for each in read_lines(lines, path) if isinstance(each, dict) and "place" in each)


def sweep(run_dir: Path, groups: Collection[int]) -> None:
    """Files of groups that are not open go: of one that ended in the hands of a holder that had lost its lease."""
    for path in (run_dir / FOLDER).glob("*.jsonl"):
        group = path.name.partition(".")[0]
        if not group.isdecimal() or int(group) not in groups:
            path.unlink(missing_ok=True)


def cut(run_dir: Path, version: int, groups: Collection[int]) -> None:
    """At the start of an attempt from this version: records of younger ones go, too."""
    with telling("unfinished episodes"):
        sweep(run_dir, groups)
        for path in (run_dir / FOLDER).glob("*.jsonl"):
            kept = [each for each in records(path) if each.get("newest", 0) <= version]
            aside = path.with_suffix(".aside")
            aside.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in kept))
            aside.replace(path)
