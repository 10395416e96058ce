"""Which checkpoints of a run are whole, without reading them.

Owns the names, the marker and the rotation of `checkpoints/step_000050/`; not what lies inside (`models/checkpoint.py`).
Light, since the coordinator and the command line ask too.

Invariant: a folder counts only with its `COMPLETE` marker, which is written last, after everything else is on the disk; so a
half-written checkpoint is never picked.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

MARKER = "COMPLETE"
_NAME = re.compile(r"step_(\d{6,})")


def folder_of(checkpoints: Path, version: int) -> Path:
    return checkpoints / f"step_{version:06d}"


def version_of(folder: Path) -> int:
    """The policy version of a checkpoint's folder. ValueError for other folders."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"a checkpoint's folder must be named step_000050 or so, got {folder.name}.")
    return int(match[1])


def publish(aside: Path, folder: Path) -> None:
    """Make what was written in `aside` the checkpoint `folder`: flush it, rename it, mark it."""
    flush_tree(aside)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)
    flush(folder.parent)
    marker = folder / MARKER
    marker.write_text(f"{version_of(folder)}\n")
    flush(marker)
    flush(folder)


def complete(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=version_of)


def newest_complete(checkpoints: Path) -> Path | None:
    return next(reversed(complete(checkpoints)), None)


def rotate(checkpoints: Path, keep: int) -> None:
    """Remove whole checkpoints but the newest `keep`, marker first, so that a half-removed one does not count; and what is older
    than these and has no marker: what others left who were killed while they removed."""
    kept = complete(checkpoints)[-keep:]
    for folder in checkpoints.iterdir() if kept else ():
        if _NAME.fullmatch(folder.name) and version_of(folder) < version_of(kept[0]):
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)


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
