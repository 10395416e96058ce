"""Which checkpoints of a run are whole, without reading them; and whether a disk has room for one.

Owns the names, the marker with its format, the rotation of `checkpoints/step_000050/`, and from which of them a run went on
with a fresh optimizer (`optimizer_resets.json`); not what lies inside
(`models/checkpoint.py`) or which are worth keeping (`launch/keeping.py`). Light, since the coordinator and the command line ask
too.

Invariant: a folder has its name only with its `COMPLETE` marker, which is written after everything else is on the disk, and
before the folder is renamed; so a half-written checkpoint is never picked. One of a newer release is refused, not passed over.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import orjson

from rondo.runtime import formats
from rondo.runtime.errors import RondoError
from rondo.runtime.records.record import write_whole

MARKER = "COMPLETE"
ASIDE = "set_aside"
"""Where checkpoints lie that a run went back behind."""
RESETS = "optimizer_resets.json"
_NAME = re.compile(r"step_(\d{6,})")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoom(RondoError, OSError):
    """A disk has no room for a checkpoint; there may be some later."""

    def __init__(self, place: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{place} must have room for {needed_bytes} bytes, got {free_bytes} free. Make room there")
        self.place, self.needed_bytes, self.free_bytes = place, needed_bytes, free_bytes


def folder_of(checkpoints: Path, version: int) -> Path:
    return checkpoints / f"step_{version:06d}"


def version_of(folder: Path) -> int:
    """The policy version of a checkpoint's folder. ValueError for other folders."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"a checkpoint's folder must be named step_000050 or so, got {folder.name}.")
    return int(match[1])


def is_named(folder: Path) -> bool:
    """Whether a folder is named as a checkpoint's, whole or not."""
    return folder.is_dir() and _NAME.fullmatch(folder.name) is not None


def publish(aside: Path, folder: Path) -> None:
    """Make what was written in `aside` the checkpoint `folder`: flush it, mark it, rename it."""
    flush_tree(aside)
    marker = aside / MARKER
    marker.write_bytes(orjson.dumps({"version": version_of(folder), **formats.stamp(formats.CHECKPOINT)}) + b"\n")
    flush(marker)
    flush(aside)
    if folder.exists():
        # Unmarked before it goes: a half-removed checkpoint of the same version must not count.
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)
    aside.rename(folder)
    flush(folder.parent)


def check_format(folder: Path) -> None:
    """ConfigError for a checkpoint that only a newer release can read. The first releases' markers held the version alone."""
    try:
        told = orjson.loads((folder / MARKER).read_bytes())
    except orjson.JSONDecodeError:
        return
    if isinstance(told, dict):
        formats.check(told, formats.CHECKPOINT, folder)


def free_bytes(place: Path) -> int:
    """What an ordinary user may still write where `place` lies, or will lie."""
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room: of the disk, a quota, or the greatest size of a file."""
    return any(
        isinstance(each, NoRoom)
        or getattr(each, "errno", None) in _FULL
        or any(f"os error {number})" in str(each) for number in _FULL)
        for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def complete(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=version_of)


def newest_complete(checkpoints: Path) -> Path | None:
    """None where there is none. ConfigError as of `check_format`."""
    newest = next(reversed(complete(checkpoints)), None)
    if newest is not None:
        check_format(newest)
    return newest


def rotate(checkpoints: Path, keep: int, held: Collection[int] = ()) -> None:
    """Remove whole checkpoints but the newest `keep` and those of the versions `held`, marker first, so that a half-removed one
    does not count; and what is older and has no marker: what others left who were killed while they removed."""
    kept = complete(checkpoints)[-keep:]
    for folder in checkpoints.iterdir() if kept else ():
        if _NAME.fullmatch(folder.name) and version_of(folder) < version_of(kept[0]) and version_of(folder) not in held:
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)


def set_aside(checkpoints: Path, newest: int) -> list[Path]:
    """Whole checkpoints of versions above `newest` count no more: where each lies now."""
    aside = checkpoints / ASIDE
    moved = []
    for folder in complete(checkpoints):
        if version_of(folder) > newest:
            aside.mkdir(exist_ok=True)
            place = aside / folder.name
            if place.exists():  # of a time before
                shutil.rmtree(place)
            moved.append(folder.rename(place))
    return moved


def resets(run_dir: Path) -> list[int]:
    """The versions from which the run at `run_dir` went on with a fresh optimizer, in their order."""
    try:
        return list(map(int, orjson.loads((run_dir / RESETS).read_bytes())))
    except FileNotFoundError:
        return []


def goes_on_from(run_dir: Path, version: int, *, reset: bool) -> None:
    """Write down that the run goes on from `version`, with a fresh optimizer if `reset`: those of later versions, which it goes
    back behind, count no more."""
    before = resets(run_dir)
    found = sorted({*(each for each in before if each <= version), *([version] if reset else [])})
    if found != before:
        write_whole(run_dir / RESETS, orjson.dumps(found))


def flush_tree(folder: Path) -> None:
    """Everything in `folder`, and its own list of names, is on the disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        flush(path)


def flush(path: Path) -> None:
    """What was written to a file, or the names in a folder, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
