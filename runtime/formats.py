"""Formats: the number that everything a run leaves on disk carries, and the one line that refuses what a newer release wrote.

Owns the numbers of run directories and checkpoints, and how a format is said and checked. Does not own how an older form is read:
whoever reads it does (journals and dumps of the index: `comm/bus/formats.py`). Format 0 is what has no number: the first
releases.

    stamp(RUN)                       -> {"format": 1, "release": "0.1.0"}
    check(fields, RUN, "runs/demo")  -> 1; ConfigError where only a newer release can read it
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from rondo.runtime.errors import ConfigError

RUN = 1
"""Of a run directory: `format.json`."""
CHECKPOINT = 1
"""Of a checkpoint: its marker."""


@functools.cache
def release() -> str:
    """The release that runs here."""
    return version_of("rondo-rl") or "unknown"


def version_of(package: str) -> str | None:
    """Of what is installed; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def stamp(number: int) -> dict[str, Any]:
    """What something written now says of its own form."""
    return {"format": number, "release": release()}


def check(fields: Mapping[str, Any], newest: int, where: object) -> int:
    """The format of what lies `where` and says `fields` of itself. ConfigError when it is newer than `newest`, or no number."""
    found = fields.get("format", 0)
    if not isinstance(found, int) or not 0 <= found <= newest:
        raise ConfigError(
            f"{where} must be of format {newest} or older, got {found}, which rondo {fields.get('release', '?')} wrote. "
            f"This is rondo {release()}: go on with that release or a newer one."
        )
    return found
