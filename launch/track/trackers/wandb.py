"""Weights & Biases: one run of a fixed id, whose own step is the point's number; the x axis of every chart is "step".

W&B takes no step lower than the last one that it has. Online it says at the start which that is, and a run goes on behind it.
Its own process keeps what it was told in memory for a while, so that only the end of a run says that all is kept: after a death
of ours it is told again since then. Offline each life has a folder of its own, which `wandb sync --append` uploads into one run.
"""

from __future__ import annotations

from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig


class Wandb:
    """`last` is W&B's own step, online; offline it knows of none."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        import wandb

        folder = config.folder or run.path / "trackers" / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True,
            x_save_requirements=False, host="rondo",  # or it has the machine's name
            **({} if config.url is None else {"base_url": config.url}),
        )  # fmt: skip
        self._run = wandb.init(
            project=config.project, name=run.name, id=run.id, resume="allow", dir=folder, config=run.settings,
            mode="offline" if config.offline else "online", settings=quiet,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        self.last = None if config.offline else max(self._run.step - 1, 0)

    def log(self, point: Point) -> None:
        self._run.log({**point.values, "step": point.step}, step=point.number, commit=True)

    def flush(self) -> bool:
        return False

    def close(self) -> None:
        self._run.finish()


open = Wandb
