"""A window of steps under torch's profiler, by rank: what the trainer computed, and on a device what memory it held.

Owns the window and its files. Does not own what a step is (`roles/actor.py`).

    window = Window(config.debug.profile, run_dir / "profile", rank)
    window.begin(step) ... window.end(step)      # both on the compute thread, which alone is seen
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rondo.roles.config.samples import ProfileConfig


class Window:
    """An actor that starts again within the window has a file of its own from there on. A file that cannot be written is told of
    by the error that `end` returns."""

    def __init__(self, config: ProfileConfig, folder: Path, rank: int) -> None:
        self._config, self._folder, self._rank = config, folder, rank
        self._first = 0
        self._profiler: Any = None

    def begin(self, step: int) -> None:
        config = self._config
        if self._profiler is not None or not config.first <= step <= config.last:
            return
        self._first, self._profiler = step, torch.profiler.profile(profile_memory=config.memory)
        if config.memory and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
        self._profiler.start()

    def end(self, step: int, *, leaves: bool) -> str | None:
        """After a step; `leaves`: no other one comes. Why the files could not be written, if so."""
        if self._profiler is None or (step < self._config.last and not leaves):
            return None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        name = f"steps_{self._first:06d}_to_{step:06d}_rank_{self._rank}"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if self._config.memory and torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return None
