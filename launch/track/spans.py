"""Spans: what the timeline of a run says, each span once, when it has ended.

Owns which spans are whole, and how far each file was read. Does not own the files (`runtime/records/timeline.py`), whose oldest
go when they have grown: what nobody has read by then is lost. A `Spans` is a place in all of them, as `Points` is one in
metrics.jsonl. Invariant: a span that is open comes when its end is read, or when its process has had another life, or at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rondo.launch.report.timeline import FileState, Reader, SpanRecord

PIECE_BYTES = 1 << 18
"""Of a file that is read at once."""


class Spans:
    """A place in a timeline that may still grow: at its beginning, or where `state` says."""

    def __init__(self, folder: Path, state: Mapping[str, Any] | None = None) -> None:
        kept = state or {"files": {}, "clocks": {}, "open": []}
        self._folder, self._clocks = folder, dict(kept["clocks"])
        self._files = {folder / name: FileState(**each) for name, each in kept["files"].items()}
        self._open = {span.key: span for span in (SpanRecord(**each) for each in kept["open"])}

    def state(self) -> dict[str, Any]:
        """As JSON, to begin here again."""
        files = {str(path.relative_to(self._folder)): asdict(each) for path, each in self._files.items()}
        return {"files": files, "clocks": self._clocks, "open": [asdict(span) for span in self._open.values()]}

    def read(self, *, is_over: bool, living: str = "") -> list[SpanRecord]:
        """The next whole spans, of a piece of one file; none where nothing has come. is_over: those that are open come too, but
        for those of a `living` process."""
        reader, found = Reader(self._folder, self._files, self._clocks), list[SpanRecord]()
        for path in reader.paths():
            before = self._files[path].offset
            reader.read_file(path, self._files[path], found, PIECE_BYTES)
            if self._files[path].offset > before:
                return self._whole(found, self._files[path])
        ended = [span for span in self._open.values() if is_over and span.process != living]
        for span in ended:
            del self._open[span.key]
        return ended

    def _whole(self, found: list[SpanRecord], file: FileState) -> list[SpanRecord]:
        for key, span in list(self._open.items()):
            if span.process == file.process and span.incarnation < file.incarnation:
                found.append(self._open.pop(key))
        whole = []
        for span in found:
            if span.still and span.incarnation == file.incarnation:
                self._open[span.key] = span
            else:
                self._open.pop(span.key, None)
                whole.append(span)
        return whole
