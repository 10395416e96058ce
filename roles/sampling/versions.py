"""Versions of a job without rollouts whose answers are to be measured: folders in the run directory, until that is done.

Owns their names, and what is known of them. Does not own the weights in them, which the trainer writes
(`roles/supervised.py`), nor the measuring (`roles/evaluate.py`).

    runs/sft/evaluating/
      attempt_0         the trainer has begun; what an attempt before had of versions that are to be made anew is gone
      version_000050    weights that are to be measured
      version_000000.json   what was found of others
      end_0             no more will come

Invariant: a version that was handed over is there, as a folder or with its result, until the run is over or a later attempt
makes it anew. So whoever is killed, the trainer hands over none twice, and none is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.records.record import write_whole


@dataclass(frozen=True, slots=True)
class Versions:
    run_dir: Path
    attempt: int

    @property
    def _folder(self) -> Path:
        return self.run_dir / "evaluating"

    def folder_of(self, version: int) -> Path:
        return self._folder / f"version_{version:06d}"

    def begin(self, version: int) -> None:
        """The trainer goes on from `version`: the first time in an attempt, later ones are forgotten."""
        begun = self._folder / f"attempt_{self.attempt}"
        if begun.exists():
            return
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("version_*"):
            if int(path.name.removeprefix("version_")[:6]) > version:
                path.unlink() if path.is_file() else shutil.rmtree(path)
        begun.touch()

    def end(self) -> None:
        (self._folder / f"end_{self.attempt}").touch()

    def knows(self, version: int) -> bool:
        """Whether it was handed over."""
        return self.folder_of(version).is_dir() or self._result(version).is_file()

    def waiting(self) -> list[int]:
        """Those that are to be measured, in their order; none before the trainer has begun."""
        if not (self._folder / f"attempt_{self.attempt}").exists():
            return []
        names = sorted(path.name for path in self._folder.glob("version_*") if path.is_dir())
        return [int(number) for name in names if (number := name.removeprefix("version_")).isdigit()]

    def ended(self) -> bool:
        """Whether no more will come."""
        return (self._folder / f"end_{self.attempt}").exists()

    def done(self, version: int, found: Mapping[str, Any]) -> None:
        write_whole(self._result(version), orjson.dumps(found))
        shutil.rmtree(self.folder_of(version), ignore_errors=True)

    def _result(self, version: int) -> Path:
        return self._folder / f"version_{version:06d}.json"
