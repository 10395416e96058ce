"""ClearML: one task, found by its tag, whose server keeps one value for a task, metric, variant and iteration.

Online a point that comes twice is therefore one. Offline each life of ours is a session of its own, in ClearML's folder
(`~/.clearml/cache/offline`), which `Task.import_offline_session` uploads; of values for the same iteration the server keeps one.
"""

from __future__ import annotations

import os

from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig
from rondo.runtime.errors import RondoError

_GATHERED = (
    "detect_repository", "tensorboard", "matplotlib", "tensorflow", "pytorch", "xgboost", "scikit", "fastai", "lightgbm", "hydra",
    "tfdefines", "joblib", "megengine", "catboost", "gradio", "jsonargparse",
)  # fmt: skip
"""What ClearML takes without being told; the first is the working tree, with what is not committed of it."""


class ClearML:
    """A metric's title is its series, "train" say."""

    last = None

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        if config.folder is not None:
            os.environ["CLEARML_CACHE_DIR"] = str(config.folder.resolve())
        os.environ.setdefault("CLEARML_WORKER_NAME", "rondo")  # or each event has the machine's
        from clearml import Task

        tag, found = f"rondo-{run.id}", []
        if config.offline:
            Task.set_offline(offline_mode=True)
        else:
            found = Task.get_tasks(project_name=config.project, tags=[tag])
        goes_on = {"reuse_last_task_id": found[0].id, "continue_last_task": 0} if found else {}
        self._task = Task.init(
            config.project, run.name, tags=[tag], **{"reuse_last_task_id": False, **goes_on}, auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(_GATHERED, False), auto_resource_monitoring=False, auto_connect_streams=False,
        )  # fmt: skip
        if not found:
            self._task.connect(dict(run.settings))
        self._logger = self._task.get_logger()

    def log(self, point: Point) -> None:
        for name, value in point.values.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series, value, point.step)

    def flush(self) -> bool:
        if not self._task.flush(wait_for_uploads=True):
            raise RondoError("ClearML must take what was logged, got no answer in time")
        return True

    def close(self) -> None:
        self._task.close()


open = ClearML
