"""SwanLab: one experiment of a fixed id, which takes a value once for a step and name.

It keeps what it is given in memory until its run is closed. After a death of ours it is told again since the last close: online
the experiment of the same id goes on, and SwanLab leaves out what it has; offline each life has a folder of its own, which
`swanlab sync` uploads.
"""

from __future__ import annotations

from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig


class SwanLab:
    """The experiment, open."""

    last = None

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        import swanlab

        folder = config.folder or run.path / "trackers" / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        online = {} if config.offline else {"id": run.id, "resume": "allow"}
        settings = swanlab.Settings(
            probe=dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False),
            terminal={"proxy_type": "none"}, interactive=False, **({} if config.url is None else {"api_host": config.url}),
        )  # fmt: skip
        self._run = swanlab.init(
            project=config.project, name=run.name, log_dir=str(folder), config=dict(run.settings), settings=settings,
            mode="offline" if config.offline else "online", **online,
        )  # fmt: skip

    def log(self, point: Point) -> None:
        self._run.log(dict(point.values), step=point.step)

    def flush(self) -> bool:
        return False

    def close(self) -> None:
        self._run.finish()


open = SwanLab
