"""The critic's part of a checkpoint: written aside by the critic, and taken in by the actor before the checkpoint counts.

Owns where parts lie until then, and how the actor learns that one will not come. Does not own what lies in one
(`models/checkpoint.py`), nor when it is written (`saving.py`).

    checkpoints/.critic.2/step_000050/    whole, of version 50 in attempt 2        -> checkpoints/step_000050/critic/
    checkpoints/.critic.2/next            "51": of versions before, no part comes that is not there

Invariant: a part is named by attempt and version, which are committed once; so one that is there is the one that is meant. It
stays where it is while the actor may still be killed before its checkpoint counts: that has links to its files.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rondo.runtime.checkpoints import complete, folder_of, rotate
from rondo.runtime.records.record import write_whole

_KEPT = 2
"""Whose checkpoints may be written still."""


class Parts:
    """Of the role `name` in one attempt of a run."""

    def __init__(self, checkpoints: Path, name: str, attempt: int) -> None:
        self._checkpoints, self._name = checkpoints, name
        self.place = checkpoints / f".{name}.{attempt}"

    def folder(self, version: int) -> Path:
        return folder_of(self.place, version)

    def is_whole(self, version: int) -> bool:
        return self.folder(version) in complete(self.place)

    def never_comes(self, version: int) -> bool:
        """Of one that is not there."""
        try:
            return version < int((self.place / "next").read_text())
        except (FileNotFoundError, ValueError):  # not begun
            return False

    def open(self, version: int) -> None:
        """Where its role begins with a version; parts of other attempts go."""
        for other in self._checkpoints.glob(f".{self._name}.*"):
            if other != self.place:
                shutil.rmtree(other, ignore_errors=True)
        self.none_before(version)

    def none_before(self, version: int) -> None:
        """Of older versions no part comes that is not there; of those that are, only the newest stay."""
        self.place.mkdir(parents=True, exist_ok=True)
        write_whole(self.place / "next", str(version).encode())
        rotate(self.place, _KEPT)

    def take(self, version: int, folder: Path) -> None:
        """Into the checkpoint that is written in `folder`."""
        shutil.copytree(self.folder(version), folder / self._name, copy_function=linked)


def linked(source: str, target: str) -> None:
    """Files of weights are written once, and never to."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)
