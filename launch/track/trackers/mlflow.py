"""MLflow: a run that is found by its tag, and metrics in batches that carry the number of their last point.

MLflow appends what it is given twice with another time or value. A point has the time of its record, so that a database takes the
same point once; and "point", the number of the last one, is the last metric of each batch, which says where to go on.
"""

from __future__ import annotations

import re

from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig

_TAG, _NUMBER = "rondo.run", "point"
_REFUSED = re.compile(r"[^\w. :/-]")
"""What names of MLflow's metrics may not have."""
_MOST = 1000
"""Metrics that a batch may have."""
_MOST_PARAMETERS = 100


class MLflow:
    """One run of an experiment."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client = client = mlflow.MlflowClient(config.url)
        experiment = client.get_experiment_by_name(config.project)
        where = experiment.experiment_id if experiment is not None else client.create_experiment(config.project)
        found = client.search_runs([where], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(where, tags={_TAG: run.id}, run_name=run.name).info.run_id
            parameters = [Param(name, str(value)[:500]) for name, value in run.settings.items()]
            for at in range(0, len(parameters), _MOST_PARAMETERS):
                client.log_batch(self._id, params=parameters[at : at + _MOST_PARAMETERS])
        self.last = int(found[0].data.metrics.get(_NUMBER, 0)) if found else 0
        self._pending: list[Point] = []

    def log(self, point: Point) -> None:
        self._pending.append(point)

    def flush(self) -> bool:
        from mlflow.entities import Metric

        while self._pending:
            batch: list[Metric] = []
            num_points = 0
            for point in self._pending:
                if batch and len(batch) + len(point.values) + 1 > _MOST:
                    break
                at = int(point.time * 1000)
                names = ((_REFUSED.sub("_", name.replace("@", "_at_")), value) for name, value in point.values.items())
                batch += [Metric(name, value, at, point.step) for name, value in names]
                num_points += 1
            last = self._pending[num_points - 1]
            batch.append(Metric(_NUMBER, last.number, int(last.time * 1000), last.number))
            self._client.log_batch(self._id, metrics=batch)
            del self._pending[:num_points]
        return True

    def close(self) -> None:
        self._client.set_terminated(self._id)


open = MLflow
