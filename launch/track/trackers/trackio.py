"""trackio: its local database, one row a point. `trackio show` looks at it, `trackio sync` uploads it to a Space.

The rows are counted, which says exactly what the database has: it takes what was logged in order, each batch whole or not at all.
"""

from __future__ import annotations

import os
import time

from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig
from rondo.runtime.errors import RondoError

_FLUSH_S = 60.0
_LOOK_S = 0.05


class Trackio:
    """A run of trackio's is found by its name alone, which therefore ends in the id."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        if config.folder is not None:
            os.environ["TRACKIO_DIR"] = str(config.folder.resolve())
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._run = trackio.init(
            config.project, f"{run.name}-{run.id[:6]}", config=dict(run.settings), resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip
        self._num_rows = lambda: int(SQLiteStorage.get_log_count(config.project, run_id=self._run.id))
        self.last = self._logged = self._num_rows()

    def log(self, point: Point) -> None:
        self._run.log(dict(point.values), step=point.step)
        self._logged = point.number

    def flush(self) -> bool:
        until = time.monotonic() + _FLUSH_S
        while self._num_rows() < self._logged:
            if time.monotonic() > until:
                raise RondoError(f"trackio must write {self._logged} points within {_FLUSH_S:g} s, got fewer")
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        self._run.finish()


open = Trackio
