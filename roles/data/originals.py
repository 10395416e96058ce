"""Media of the samples that a run keeps, as they were before anything was made of them: for people to look at and to hear.

Owns the files and how much room they take. Does not own which groups are kept (`SamplesConfig`), nor what is trained from
(`training/trained_samples.py` has what the processor made). Written by the workers that read the media, beside all else.

    samples/media/step_000012.jsonl                      {"group": 96, "media": [["image", ["5d1c..."]], ...]}
    samples/media/5d1c93f0...                            its bytes, once, named by their hash

Invariant: what cannot be written is told and costs no row; the files take at most `samples.media_bytes` and what a 64th of it a
worker adds, and those that were used longest ago make room.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rondo.runtime.records.record import JsonLines, read_lines
from rondo.runtime.records.telling import telling

FOLDER = Path("samples") / "media"
_WHAT = "kept media"
_LEFT = 0.9
"""Of the room, where it was too little."""


class Originals:
    """Those of the run in `run`, in at most so many bytes."""

    def __init__(self, run: Path, most_bytes: int) -> None:
        self._folder, self._most = run / FOLDER, most_bytes
        self._added = most_bytes  # nobody has looked yet

    def put(self, data: bytes | Sequence[bytes]) -> list[str]:
        """The names of a medium's file, or of its frames; none where they cannot be kept."""
        with telling(_WHAT):
            self._folder.mkdir(parents=True, exist_ok=True)
            return [self._put(each) for each in ([data] if isinstance(data, bytes) else data)]
        return []

    def keep(self, step: int, group: int, media: Sequence[tuple[str, Sequence[str]]]) -> None:
        """(kind, names) of each medium of a prompt group that the step trains."""
        with JsonLines(self._folder / f"step_{step:06d}.jsonl", what=_WHAT) as lines:
            lines.write({"group": group, "media": media})

    def _put(self, data: bytes) -> str:
        name = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = self._folder / name
        try:
            os.utime(path)
        except FileNotFoundError:
            if self._added + len(data) > self._most // 64:
                self._make_room(len(data))
            aside = path.with_name(f".{name}.{os.getpid()}")
            try:
                aside.write_bytes(data)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
            self._added += len(data)
        return name

    def _make_room(self, num_bytes: int) -> None:
        """Looks at what all workers have written."""
        if num_bytes > self._most:
            raise OSError(f"a medium must take at most samples.media_bytes = {self._most} to be kept, got {num_bytes}")
        self._added = 0
        with os.scandir(self._folder) as entries:
            found = [(each.stat(), each.path) for each in entries if not each.name.endswith(".jsonl")]
        total = sum(told.st_size for told, _ in found) + num_bytes
        if total <= self._most:
            return
        for told, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if total <= self._most * _LEFT:
                break
            Path(path).unlink(missing_ok=True)  # another worker may have been first
            total -= told.st_size


def of_group(run: Path, step: int, group: int) -> list[dict[str, Any]]:
    """[{"kind": "image", "name": ..., "bytes": ...}, ...] of a prompt group; bytes None for one that is no longer there."""
    path, found = run / FOLDER / f"step_{step:06d}.jsonl", list[Any]()
    with suppress(FileNotFoundError):
        for record in read_lines(path.read_bytes().splitlines(keepends=True), path):
            found = record["media"] if record["group"] == group else found
    return [{"kind": kind, "name": name, "bytes": _size(run, name)} for kind, names in found for name in names]


def _size(run: Path, name: str) -> int | None:
    with suppress(OSError):
        return (run / FOLDER / name).stat().st_size
    return None
