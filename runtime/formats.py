"""Formats: the number that everything a run leaves on disk carries, and the one line that refuses what this release cannot read.

Owns the numbers, and how a format is said and checked. Does not own how an older form is read: whoever reads it does. Format 0 is
what has no number: the first releases.

    stamp(RUN)                       -> {"format": 1, "release": "0.1.0"}
    check(fields, RUN, "runs/demo")  -> None; ConfigError where only a newer release can read it
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from rondo.runtime.errors import ConfigError

RUN = 1
"""Of a run directory: `format.json`."""
CHECKPOINT = 2
"""Of a checkpoint: its marker. Since format 2 it has the digest of every file."""
JOURNAL, OLDEST_JOURNAL = 7, 3
"""Of the coordinator's journal and the dumps of its index: today's, and the oldest that is read. Since format 4 a put is
journalled as its record's own bytes, before, field by field; since 5 the journal says which step a trainable role was told to
leave; since 6 which rows were left out; since 7 a row's reward before its length took anything off it. A field that an older dump
does not have begins as in a new index."""


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


def check(fields: Mapping[str, Any], newest: int, where: object, *, oldest: int = 0) -> None:
    """What lies `where` says `fields` of itself. ConfigError when its format is newer than `newest`, or no number, or older than
    `oldest`."""
    found = fields.get("format", 0)
    if not isinstance(found, int) or not oldest <= found <= newest:
        rule = f"{oldest} to {newest}" if oldest else f"{newest} or older"
        others = "" if isinstance(found, int) and found < oldest else " or a newer one"
        raise ConfigError(
            f"{where} must be of format {rule}, got {found}, which rondo {fields.get('release', '?')} wrote. "
            f"This is rondo {release()}: go on with that release{others}."
        )
